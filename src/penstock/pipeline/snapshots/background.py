"""Snapshots in the background: threads copy tables while the epochs of other tables continue.

The spool keeps a table's changes from a position before the fence, until the epochs take over the table and
apply these changes. This module retries transient errors.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from pyspark import InheritableThread

from penstock.errors import PenstockError, Recovery, TableFailedError
from penstock.foreign import describe
from penstock.pipeline.error_policy import USUAL_ATTEMPTS, final
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.snapshots.coordinator import SnapshotCoordinator
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.sinks.base import Target

_log = logging.getLogger("penstock.snapshot")

_AT_ONCE = 3
"""Maximum number of groups of tables that are copied at once. Each group holds a temporary slot of the
source.
"""
_LONGEST_PAUSE_SECONDS = 30.0


class SnapshotListener(Protocol):
    """Receives finished copies: `TableLifecycle` for snapshots, a `ResyncListener` for each resync."""

    def set_fence(self, name: TableName, fence: Position) -> None: ...

    def add_copied(self, target: Target) -> None: ...

    def fail(self, name: TableName, error: PenstockError) -> None: ...


class BackgroundSnapshots:
    """Copies groups of tables, each group in a separate thread. `check` raises the error that ended a thread.
    `stop` ends all threads.
    """

    def __init__(
        self, coordinator: SnapshotCoordinator, listener: SnapshotListener, observer: PipelineObserver
    ) -> None:
        self._coordinator = coordinator
        self._listener = listener
        self._observer = observer
        self._stopping = threading.Event()
        self._permits = threading.Semaphore(_AT_ONCE)
        self._threads: list[threading.Thread] = []
        self._copying: set[TableName] = set()
        self._abandoned: set[TableName] = set()
        """Tables among `_copying` that were removed from the pipeline. Their copies are discarded when they
        end.
        """
        self._lock = threading.Lock()
        self._failure: Exception | None = None

    def start(self, tables: Sequence[CatalogTable]) -> None:
        """Copy these tables in a new thread. The spool must already keep their changes."""
        self._copying.update(table.name for table in tables)
        thread = InheritableThread(
            target=self._run,
            args=(list(tables),),
            name=f"penstock-snapshot-{len(self._threads) + 1}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def is_copying(self, name: TableName) -> bool:
        return name in self._copying

    def abandon(self, name: TableName) -> None:
        """Discard the unfinished snapshot of a table that was removed from the pipeline. A copy in progress
        is discarded when it ends. A later snapshot of the table cannot reuse the chunks, because the table's
        changes are no longer captured.
        """
        with self._lock:
            if name in self._copying:
                self._abandoned.add(name)
                return
        self._coordinator.store.forget(name)

    def check(self) -> None:
        """Raise the error that ended a thread, if any."""
        if self._failure is not None:
            raise self._failure

    @property
    def is_over(self) -> bool:
        """Whether all threads have ended, and `check` has nothing to raise."""
        return self._failure is None and not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """End the threads. The next run continues unfinished snapshots."""
        self._stopping.set()
        if any(thread.is_alive() for thread in self._threads):
            self._coordinator.executors.cancel()
        for thread in self._threads:
            thread.join()
        for name in self._abandoned:
            self._coordinator.store.forget(name)

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def _run(self, tables: list[CatalogTable]) -> None:
        try:
            self._coordinator.executors.enter()
            with self._permits:
                self._copy(tables)
        except Exception as error:  # noqa: BLE001 `check` raises it in the main thread
            if not self.is_stopping:
                self._failure = error

    def _copy(self, tables: list[CatalogTable]) -> None:
        """Copy the tables. Returns when each of them is complete or failed, or when the run ends."""
        waiting = {table.name: table for table in tables}
        backoff = Backoff(longest_seconds=_LONGEST_PAUSE_SECONDS)

        def on_copied(name: TableName) -> None:
            target = self._coordinator.sink.load_target(name)
            assert target is not None
            waiting.pop(name, None)
            with self._lock:
                if name not in self._abandoned:
                    self._listener.add_copied(target)
                    self._copying.discard(name)
                    return
            self._coordinator.sink.release_ownership(name)
            self._forget(name)

        while waiting and not self.is_stopping:
            try:
                failures = self._coordinator.copy(
                    list(waiting.values()), self._listener.set_fence, on_copied, lambda: self.is_stopping
                )
            except PenstockError as error:
                if error.recovery is not Recovery.RETRY:
                    raise
                self._wait(error, backoff)
                continue
            except Exception as error:  # noqa: BLE001 the edge of a thread
                # The error did not occur in a step of one table, so it concerns all waiting tables.
                shown = TableFailedError(f"copying {', '.join(map(str, waiting))}: {describe(error)}")
                if backoff.failures + 1 < USUAL_ATTEMPTS:
                    self._wait(shown, backoff)
                    continue
                _log.warning("snapshots failed", extra={"code": shown.code, "cause": type(error).__name__})
                failures = {
                    name: final(TableFailedError(f"copying {name}: {describe(error)}"), name)
                    for name in waiting
                }
            for name, failure in failures.items():
                del waiting[name]
                self._end_failed(name, failure)

    def _end_failed(self, name: TableName, error: PenstockError) -> None:
        with self._lock:  # `abandon` must find the table either copying or ended
            if name not in self._abandoned:
                self._listener.fail(name, error)
                self._copying.discard(name)
                return
        self._forget(name)

    def _forget(self, name: TableName) -> None:
        """Forget a removed table whose copy has ended. The table may then be added again."""
        self._coordinator.store.forget(name)
        with self._lock:
            self._abandoned.discard(name)
            self._copying.discard(name)

    def _wait(self, error: PenstockError, backoff: Backoff) -> None:
        pause = backoff.fail()
        self._coordinator.retries.note("snapshots", error, backoff.failures, pause)
        self._observer.interrupted(str(error), pause)
        self._stopping.wait(pause)
