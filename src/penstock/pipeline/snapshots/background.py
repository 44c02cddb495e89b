"""Snapshots beside the stream: tables are copied by threads of their own while the epochs of the others go on.

The spool keeps a table's changes from before its fence until the table is handed over to the epochs, which then bring it from the fence to
where the others are. What time can mend is tried again here; nobody else waits for it.
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
"""Groups of tables; each holds a temporary slot of the source while it is copied."""
_LONGEST_PAUSE_SECONDS = 30.0


class Door(Protocol):
    """Who takes over what has been copied: the epochs, or, for a table that is copied anew, its shadow."""

    def hold(self, name: TableName, fence: Position) -> None: ...

    def enter(self, target: Target) -> None: ...

    def fail(self, name: TableName, error: PenstockError) -> None: ...


class BackgroundSnapshots:
    """Started with groups of tables, one thread each; `stop` ends them all. What only a person can mend is kept for `check`."""

    def __init__(self, coordinator: SnapshotCoordinator, door: Door, observer: PipelineObserver) -> None:
        self._coordinator = coordinator
        self._door = door
        self._observer = observer
        self._stopping = threading.Event()
        self._room = threading.Semaphore(_AT_ONCE)
        self._threads: list[threading.Thread] = []
        self._copying: set[TableName] = set()
        self._failure: Exception | None = None

    def start(self, tables: Sequence[CatalogTable]) -> None:
        """Copy these as they are at one moment to come. Their changes must be kept by now."""
        self._copying.update(table.name for table in tables)
        thread = InheritableThread(target=self._run, args=(list(tables),), name=f"penstock-snapshot-{len(self._threads) + 1}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def is_copying(self, name: TableName) -> bool:
        return name in self._copying

    def check(self) -> None:
        """Raise what ended a thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    @property
    def is_over(self) -> bool:
        """Whether all that was started has ended, and nothing is left for `check` to raise."""
        return self._failure is None and not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """End the threads in order; what is not finished goes on in the next run."""
        self._stopping.set()
        if any(thread.is_alive() for thread in self._threads):
            self._coordinator.executors.cancel()
        for thread in self._threads:
            thread.join()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def _run(self, tables: list[CatalogTable]) -> None:
        try:
            self._coordinator.executors.enter()
            with self._room:
                self._copy(tables)
        except Exception as error:  # noqa: BLE001 it is raised again in the run's own thread
            if not self.is_stopping:
                self._failure = error

    def _copy(self, tables: list[CatalogTable]) -> None:
        """Until every table has arrived or failed, or the run is to end."""
        waiting = {table.name: table for table in tables}
        backoff = Backoff(longest_seconds=_LONGEST_PAUSE_SECONDS)

        def arrive(name: TableName) -> None:
            target = self._coordinator.sink.load_target(name)
            assert target is not None
            waiting.pop(name, None)
            self._door.enter(target)
            self._copying.discard(name)

        while waiting and not self.is_stopping:
            try:
                failures = self._coordinator.copy(list(waiting.values()), self._door.hold, arrive, lambda: self.is_stopping)
            except PenstockError as error:
                if error.recovery is not Recovery.RETRY:
                    raise
                self._wait(error, backoff)
                continue
            except Exception as error:  # noqa: BLE001 the edge of a thread
                # Not of one table's step, which the round answers for: the tables that wait for it are the ones that fail.
                shown = TableFailedError(f"copying {', '.join(map(str, waiting))}: {describe(error)}")
                if backoff.failures + 1 < USUAL_ATTEMPTS:
                    self._wait(shown, backoff)
                    continue
                _log.warning("snapshots failed", extra={"code": shown.code, "cause": type(error).__name__})
                failures = {name: final(TableFailedError(f"copying {name}: {describe(error)}"), name) for name in waiting}
            for name, failure in failures.items():
                del waiting[name]
                self._door.fail(name, failure)
                self._copying.discard(name)

    def _wait(self, error: PenstockError, backoff: Backoff) -> None:
        pause = backoff.fail()
        self._coordinator.retries.note("snapshots", error, backoff.failures, pause)
        self._observer.interrupted(str(error), pause)
        self._stopping.wait(pause)
