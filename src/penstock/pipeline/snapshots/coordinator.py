"""The snapshot coordinator: copies tables as they are at one position each, their fence, and never reads a finished chunk again.

All tables that wait are copied under one exported snapshot, by a few threads that each run one Spark task at a time: executors read ctid
chunks and write files where the target wants them. When all chunks of a table are there, the target takes the files and the fence in one
commit. When the snapshot is lost, or has been held for `max_hold_seconds`, a new one is taken at a later fence; only the missing chunks are
read under it, and rows that changed between the fences are read again by key (`snapshots/repair.py`).

What happens under one snapshot is a round (`snapshots/round.py`): which step comes next is for `snapshots/schedule.py` to say, how it is
done for `snapshots/copy.py`, and what has been done stands in `snapshots/state.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import PenstockError, Recovery
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.snapshots.copy import CopyLetters, CopyPlaces, TableCopy
from penstock.pipeline.snapshots.executors import SnapshotExecutors
from penstock.pipeline.snapshots.round import RoundEvents, RoundSource, SnapshotRound
from penstock.pipeline.snapshots.state import SnapshotStore
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import SourceAddress
from penstock.postgres.exported import Export, export_snapshot
from penstock.postgres.health import log_wait
from penstock.postgres.slot import OnWait
from penstock.postgres.types.policy import TypePolicy
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.sinks.base import Sink

_MOST_LANES = 64
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class SnapshotCoordinator:
    """For one run of one pipeline. `copy` may be called again and again, also by several threads for different tables."""

    executors: SnapshotExecutors
    address: SourceAddress
    sink: Sink
    observer: PipelineObserver
    chunk_bytes: int
    types: TypePolicy = TypePolicy.DEFAULT
    publication: str | None = None
    store: SnapshotStore = field(kw_only=True)
    spool: Path = field(kw_only=True)
    export: Export = field(default=export_snapshot, kw_only=True)
    """Takes the snapshots, each with its fence."""
    slot: str | None = field(default=None, kw_only=True)
    """Whose log the changes after the fences come from. It is looked at now and then: without it the copying is pointless."""
    max_hold_seconds: float | None = field(default=None, kw_only=True)
    on_wait: OnWait = field(default=log_wait, kw_only=True)
    letters: CopyLetters | None = field(default=None, kw_only=True)
    """Takes rows that are refused; without it they stop their table."""
    retries: RetryLog = field(default_factory=RetryLog, kw_only=True)
    """What is tried again, for status."""
    is_by_looks: bool = field(default=False, kw_only=True)
    """Whether changes come by looks, each with all that happened since the one before."""

    def copy(
        self,
        tables: Sequence[CatalogTable],
        on_fence: Callable[[TableName, Position], None],
        on_finished: Callable[[TableName], None],
        is_stopping: Callable[[], bool],
    ) -> dict[TableName, PenstockError]:
        """Copy all `tables`; gives back those that cannot be copied, each with its reason. What time can mend is tried again.

        `on_fence` is told, for each table, after which position its changes are needed; `on_finished`, that its target is complete.
        """
        lanes = max(1, min(self.executors.parallelism, _MOST_LANES))
        places = self._places(lanes, is_stopping)
        source = RoundSource(self.address, self.slot, self.on_wait, self.max_hold_seconds, self.export)
        events = RoundEvents(self.observer, on_fence, on_finished, is_stopping, self.retries)
        failures: dict[TableName, PenstockError] = {}
        waiting = [TableCopy(table, places) for table in tables]
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while waiting and not is_stopping():
            due = [copy for copy in waiting if copy.is_due and events.attempts.is_due(copy.name)]
            if not due:
                _wait(_POLL_SECONDS, is_stopping)
                continue
            copying = self._next_round(source, due, lanes, events)
            error = _tried(copying)
            failures |= copying.failures
            waiting = [copy for copy in waiting if copy.name not in failures and copy not in copying.finished]
            if copying.has_advanced:
                backoff.reset()
            if error is not None and copying.is_locking:
                copying.back_off(error)
            elif error is not None and waiting:
                pause = backoff.fail()
                self.observer.interrupted(str(error), pause)
                self.retries.note("snapshots", error, backoff.failures, pause)
                _wait(pause, is_stopping)
            elif error is None:
                self.retries.clear("snapshots")
        return failures

    def _next_round(self, source: RoundSource, due: Sequence[TableCopy], lanes: int, events: RoundEvents) -> SnapshotRound:
        """A small table that was disturbed before has a round of its own, under a lock. That is known to work with a slot alone."""
        lockable = [copy for copy in due if copy.is_lockable] if self.slot is not None else []
        if lockable:
            return SnapshotRound(source, lockable[:1], 1, events, is_locking=True)
        return SnapshotRound(source, due, lanes, events)

    def _places(self, lanes: int, is_stopping: Callable[[], bool]) -> CopyPlaces:
        return CopyPlaces(
            self.executors,
            self.address,
            self.sink,
            self.store,
            self.spool,
            self.observer,
            self.chunk_bytes,
            lanes,
            self.types,
            self.publication,
            is_stopping,
            self.letters,
            self.is_by_looks,
        )


def _tried(copying: SnapshotRound) -> PenstockError | None:
    """Run a round; gives what went wrong in it and may go right in the next."""
    try:
        copying.run()
    except PenstockError as error:
        if error.recovery is not Recovery.RETRY:
            raise
        return error
    return copying.trouble


def _wait(seconds: float, is_stopping: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not is_stopping() and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
