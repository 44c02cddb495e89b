"""The snapshot coordinator: copies tables in rounds, each under one exported snapshot, with several threads
and retries.

The copy of a table is exact at one position, its fence. All waiting tables are copied under one exported
snapshot, by a few threads of the driver. Each thread runs one Spark task at a time, in which an executor
reads a ctid chunk and writes a data file of the target. So a failed chunk affects no other chunk, and an
epoch waits for at most one chunk per core. When all chunks of a table are read, the target commits the files
and the fence together.

When the exported snapshot is lost, or was held for `max_hold_seconds`, the coordinator exports a new one at a
later fence. Only the missing chunks are read under the new one. Rows that changed between the fences are read
again by key (`snapshots/executors.py`). A finished chunk is never read again. The round releases the snapshot
when only commits remain. The MERGE of a repair is part of a commit.

The work under one snapshot is a round. `snapshots/schedule.py` chooses the next step, `snapshots/copy.py`
executes it, and `snapshots/state.py` stores what is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pyspark import InheritableThread

from penstock.errors import (
    ConnectionLostError,
    LockWaitError,
    PenstockError,
    Recovery,
    SlotLostError,
    SnapshotLostError,
    TableRewrittenError,
)
from penstock.lag import OpenTransaction
from penstock.pipeline.error_policy import Action, TableRetries, Verdict, decide, final
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.snapshots.copy import CopyPlaces, SnapshotDeadLetters, TableCopy
from penstock.pipeline.snapshots.executors import SnapshotExecutors
from penstock.pipeline.snapshots.schedule import Schedule, Step, WorkItem
from penstock.pipeline.snapshots.state import SnapshotStore
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import begin_locked, lock_tables
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.server import log_wait
from penstock.postgres.slot import OnWait, check_slot, inspect_server, inspect_slot
from penstock.postgres.snapshot_export import Export, ExportedSnapshot, export_snapshot, inspect_sizes
from penstock.postgres.types.column import TypePolicy
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.sinks.base import Sink

_log = logging.getLogger("penstock.snapshot")

_RESTARTS = 30
"""How often the copy of a table may start again. With the pauses, this takes about four hours."""
_LOCK_PAUSE_SECONDS = 10.0
_LOCK_ATTEMPTS = 3
"""How often a table may fail to get its lock in a round. After that, the table leaves the round if other
tables wait for the next round.
"""
_FIRST_PAUSE_SECONDS = 1.0
_HELD_PAUSE_SECONDS = 10.0
"""The longest pause before a step is retried in the same round. If its pause is longer, the table waits for a
later round.
"""
_LOCKED_WAITS = 3
"""How many seconds the creation of a slot may wait for open transactions while tables are locked. Each report
of the wait counts as one second.
"""
_WATCH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RoundSource:
    """The source of a round: where and how to export the snapshot, and how long to hold it."""

    address: SourceAddress
    slot: str | None
    on_wait: OnWait
    hold_seconds: float | None
    export: Export = export_snapshot


@dataclass(frozen=True, slots=True)
class RoundEvents:
    """Callbacks and retries of a round."""

    observer: PipelineObserver
    on_fence: Callable[[TableName, Position], None]
    on_finished: Callable[[TableName], None]
    is_stopping: Callable[[], bool]
    retries: RetryLog = field(default_factory=RetryLog)
    """Retries in progress, for `penstock status`."""
    attempts: TableRetries = field(default_factory=TableRetries)


class _StoppedError(Exception):
    """The run ends while the round waits for its exported snapshot. The next run continues unfinished
    copies.
    """


class SnapshotRound:
    """One round: copies tables under one exported snapshot. `run` may be called once. After it, a table that
    is neither in `finished` nor in `failures` waits for a later round.
    """

    def __init__(
        self,
        source: RoundSource,
        copies: Sequence[TableCopy],
        lanes: int,
        events: RoundEvents,
        *,
        is_locking: bool = False,
        is_awaited: bool = False,
    ) -> None:
        """`is_locking`: lock the tables before the snapshot is exported, and read them with one thread, in
        the session that holds the lock.

        `is_awaited`: other tables wait for the next round.
        """
        self.is_locking = is_locking
        self._is_awaited = is_awaited
        self._waits = 0
        self._counted: dict[TableName, float] = {}
        self._lock_waits: dict[TableName, int] = {}
        self._answering = threading.Lock()
        self._source = source
        self._copies = copies
        self._lanes = lanes
        self._events = events
        self._fatal: BaseException | None = None
        self._announced: set[TableName] = set()
        self.finished: set[TableCopy] = set()
        self.failures: dict[TableName, PenstockError] = {}
        self.trouble: PenstockError | None = None
        """A transient error that ended the round early."""
        self.has_advanced = False

    def run(self) -> None:
        """Copy the tables. Raises only errors that concern all tables. The error of a single table is in
        `failures`.
        """
        self._check_slot()
        sources = [source for copy in self._copies for source in copy.table.sources]
        with connect(self._source.address) as connection:
            sizes = inspect_sizes(connection, [source.oid for source in sources])
        threads: list[threading.Thread] = []
        try:
            with (
                self._locked(sources) as session,
                self._source.export(self._source.address, self._announce_wait, sources) as exported,
            ):
                self._import(session, exported)
                schedule = Schedule(
                    [
                        (copy, sum(sizes.get(source.oid, 0) for source in copy.table.sources))
                        for copy in self._copies
                    ],
                    is_stopping=self._events.is_stopping,
                    hold_seconds=self._source.hold_seconds,
                )
                threads += [self._start_lane(number, schedule, exported) for number in range(self._lanes)]
                self._watch(schedule)
            _log.info(
                "snapshot released", extra={"fence": str(exported.fence), "is_expired": schedule.is_expired}
            )
        except _StoppedError:
            return
        finally:
            for thread in threads:
                thread.join()
            for copy in self._copies:
                copy.session = None
        self.has_advanced = schedule.chunks_read > 0 or bool(self.finished)
        if self._fatal is not None:
            raise self._fatal

    @contextmanager
    def _locked(self, sources: Sequence[CatalogTable]) -> Iterator[Connection | None]:
        if not self.is_locking:
            yield None
            return
        with lock_tables(self._source.address, [source.name for source in sources]) as session:
            yield session

    def _import(self, session: Connection | None, exported: ExportedSnapshot) -> None:
        if session is not None:
            begin_locked(session, exported.name, self._copies[0].name)
            for copy in self._copies:
                copy.session = session

    def back_off(self, error: PenstockError) -> None:
        """Postpone the tables of a locking round to a later round, after a pause. Called when `error`
        prevented the lock, or the export of the snapshot under the lock.
        """
        for copy in self._copies:
            copy.back_off()
            self._events.observer.interrupted(str(error), copy.restarts.seconds)
            self._events.retries.note(_subject(copy), error, copy.restarts.failures, copy.restarts.seconds)

    def _watch(self, schedule: Schedule[TableCopy]) -> None:
        """Wait until no step needs the snapshot any more. Until then, check regularly that the slot is still
        valid.
        """
        try:
            while not schedule.await_release(_WATCH_SECONDS):
                self._check_slot()
        except SlotLostError:
            schedule.give_up()
            raise
        except BaseException:
            schedule.close()
            raise

    def _check_slot(self) -> None:
        """Raise an error if the server invalidated the slot. The changes after the fences are then lost, so
        no copy can be used.
        """
        if self._source.slot is None:
            return
        with connect(self._source.address) as connection:
            slot = inspect_slot(connection, self._source.slot)
            if slot is not None:
                check_slot(slot, inspect_server(connection).database)

    def _announce_wait(self, blockers: Sequence[OpenTransaction]) -> None:
        if self._events.is_stopping():
            raise _StoppedError
        self._waits += 1
        if self.is_locking and self._waits > _LOCKED_WAITS:
            # Creating the slot may wait for a transaction that waits for this round's lock. The server does
            # not detect this deadlock.
            raise LockWaitError(
                f"{self._copies[0].name} cannot stay locked while other transactions are open"
            )
        self._source.on_wait(blockers)

    def _start_lane(
        self, number: int, schedule: Schedule[TableCopy], exported: ExportedSnapshot
    ) -> threading.Thread:
        thread = InheritableThread(
            target=self._lane, args=(schedule, exported), name=f"penstock-chunks-{number}", daemon=True
        )
        thread.start()
        return thread

    def _lane(self, schedule: Schedule[TableCopy], exported: ExportedSnapshot) -> None:
        while (item := schedule.take()) is not None:
            started = time.monotonic()
            try:
                self._run_item(schedule, item, exported, started)
            except BaseException as error:  # noqa: BLE001 - a thread's edge: `run` raises it again
                self._abort(schedule, item, error)

    def _run_item(
        self,
        schedule: Schedule[TableCopy],
        item: WorkItem[TableCopy],
        exported: ExportedSnapshot,
        started: float,
    ) -> None:
        try:
            self._run_step(schedule, item, exported)
        except Exception as error:  # noqa: BLE001 - the edge of one table's work: the error policy decides
            with self._answering:
                self._handle_error(schedule, item, error, started)
        else:
            self._events.attempts.succeed(item.queue.table.name)

    def _run_step(
        self, schedule: Schedule[TableCopy], item: WorkItem[TableCopy], exported: ExportedSnapshot
    ) -> None:
        copy = item.queue.table
        if item.step is Step.OPEN:
            chunks = copy.open(exported)
            self._events.on_fence(copy.name, copy.plan.fence)
            schedule.opened(item, chunks, then=copy.then(exported))
        elif item.step is Step.CHUNK:
            copy.read(exported, item.chunk)
            schedule.read(item, copy.chunk_bytes(item.chunk), then=copy.then(exported))
        elif item.step is Step.REREAD:
            if copy.reread(exported):
                schedule.advance(item, Step.COMMIT)
            else:
                schedule.drop(item)
        else:
            copy.commit()
            self.finished.add(copy)
            self._events.retries.clear(_subject(copy))
            self._events.on_finished(copy.name)
            schedule.advance(item, Step.DONE)

    def _handle_error(
        self, schedule: Schedule[TableCopy], item: WorkItem[TableCopy], error: Exception, started: float
    ) -> None:
        """Handle the error of one step as the error policy says. The loss of the snapshot, and the lock of
        another session, do not count as failures of the table.
        """
        copy = item.queue.table
        if isinstance(error, TableRewrittenError):
            self._restart(schedule, item, error)
        elif isinstance(error, LockWaitError):
            self._announce_once(copy, error)
            self._lock_waits[copy.name] = self._lock_waits.get(copy.name, 0) + 1
            hint = (
                f"end the session that holds a lock on {copy.name} (pg_locks, pg_stat_activity), or "
                "wait for it"
            )
            shown = LockWaitError(error.message, hint=error.hint or hint)
            self._events.retries.note(_subject(copy), shown, self._lock_waits[copy.name], _LOCK_PAUSE_SECONDS)
            if self._yields_lock(copy):
                schedule.drop(item)
            else:
                schedule.put_back(item, copy.chunk_bytes(item.chunk), pause_seconds=_LOCK_PAUSE_SECONDS)
        elif isinstance(error, SnapshotLostError):
            self.trouble = error
            schedule.put_back(item, copy.chunk_bytes(item.chunk))
            schedule.close()
        else:
            verdict = decide(error, copy.name, "copying")
            if verdict.action is Action.STOP:
                self._abort(schedule, item, verdict.error)
            elif verdict.action is Action.FAIL_TABLE:
                self._fail(schedule, item, verdict.error)
            else:
                self._retry(schedule, item, verdict, started)

    def _yields_lock(self, copy: TableCopy) -> bool:
        """Whether to remove a table from the round because another session keeps it locked. Otherwise the
        round could not end.

        Always False if the source uses a slot: creating the next snapshot would wait for the transaction that
        holds the lock.
        """
        return (
            self._is_awaited and self._source.slot is None and self._lock_waits[copy.name] >= _LOCK_ATTEMPTS
        )

    def _defer(self, schedule: Schedule[TableCopy], item: WorkItem[TableCopy]) -> None:
        self._is_awaited = True
        schedule.drop(item)

    def _restart(
        self, schedule: Schedule[TableCopy], item: WorkItem[TableCopy], error: TableRewrittenError
    ) -> None:
        """Postpone the table to a later round, after a growing backoff. That round plans the copy again, and
        may lock the table if it is small.
        """
        copy = item.queue.table
        copy.invalidate(error.message)
        hint = f"pause the job that truncates or alters {copy.name} for as long as one copy takes"
        shown = TableRewrittenError(error.message, hint=hint)
        if copy.restarts.failures >= _RESTARTS:
            self._fail(schedule, item, final(shown, copy.name))
        else:
            pause = max(0.0, copy.restarts_at - time.monotonic())
            self._events.retries.note(_subject(copy), shown, copy.restarts.failures, pause)
            self._defer(schedule, item)

    def _retry(
        self, schedule: Schedule[TableCopy], item: WorkItem[TableCopy], verdict: Verdict, started: float
    ) -> None:
        """Retry the failed step after a pause. This failure is not counted if the step was already running
        when the previous failure of the table was counted.
        """
        copy, error = item.queue.table, verdict.error
        pause: float | None = _FIRST_PAUSE_SECONDS
        if started >= self._counted.get(copy.name, 0.0):
            self._counted[copy.name] = time.monotonic()
            pause = self._events.attempts.count(copy.name, verdict)
        _log.warning(
            "step of a snapshot failed",
            extra={"table": str(copy.name), "step": item.step.value, "code": error.code},
        )
        if pause is None:
            self._fail(schedule, item, final(error, copy.name))
            return
        self._events.retries.note(
            _subject(copy), final(error, copy.name), self._events.attempts.failures(copy.name), pause
        )
        if isinstance(error, ConnectionLostError):
            self._announce_once(copy, error)
            self.trouble = error
            schedule.put_back(item, copy.chunk_bytes(item.chunk))
            schedule.close()
        elif pause <= _HELD_PAUSE_SECONDS:
            schedule.put_back(item, copy.chunk_bytes(item.chunk), pause_seconds=pause)
        else:
            self._announce_once(copy, error)
            self._defer(schedule, item)

    def _fail(self, schedule: Schedule[TableCopy], item: WorkItem[TableCopy], error: PenstockError) -> None:
        copy = item.queue.table
        self.failures[copy.name] = error
        self._events.retries.clear(_subject(copy))
        schedule.drop(item)

    def _abort(self, schedule: Schedule[TableCopy], item: WorkItem[TableCopy], error: BaseException) -> None:
        self._fatal = self._fatal or error
        schedule.drop(item)
        schedule.close()

    def _announce_once(self, copy: TableCopy, error: PenstockError) -> None:
        if copy.name not in self._announced:
            self._announced.add(copy.name)
            self._events.observer.interrupted(str(error), _LOCK_PAUSE_SECONDS)


def _subject(copy: TableCopy) -> str:
    return f"snapshot of {copy.name}"


_MOST_LANES = 64
_COORDINATOR_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class SnapshotCoordinator:
    """Copies tables for one run of one pipeline. `copy` may be called repeatedly, also by several threads for
    different tables.
    """

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
    """The function that exports a snapshot and determines its fence."""
    slot: str | None = field(default=None, kw_only=True)
    """The slot that keeps the changes after the fences. Rounds check it while they copy, because a copy is
    useless without these changes.
    """
    max_hold_seconds: float | None = field(default=None, kw_only=True)
    on_wait: OnWait = field(default=log_wait, kw_only=True)
    dead_letters: SnapshotDeadLetters = field(kw_only=True)
    """Takes the rows that are rejected while a table is copied."""
    retries: RetryLog = field(default_factory=RetryLog, kw_only=True)
    """Retries in progress, for `penstock status`."""
    positions_are_polls: bool = field(default=False, kw_only=True)
    """Whether the capture method is polling, where one position stands for one poll. A poll contains the
    transactions that were committed after the previous poll.
    """

    def copy(
        self,
        tables: Sequence[CatalogTable],
        on_fence: Callable[[TableName, Position], None],
        on_finished: Callable[[TableName], None],
        is_stopping: Callable[[], bool],
    ) -> dict[TableName, PenstockError]:
        """Copy all `tables`. Returns the tables that cannot be copied, each with its error. Transient errors
        are retried.

        `on_fence` is called with a table and the position after which the table's changes are needed.
        `on_finished` is called with a table whose target is complete.
        """
        lanes = max(1, min(self.executors.parallelism, _MOST_LANES))
        places = self._places(lanes, is_stopping)
        source = RoundSource(self.address, self.slot, self.on_wait, self.max_hold_seconds, self.export)
        events = RoundEvents(self.observer, on_fence, on_finished, is_stopping, self.retries)
        failures: dict[TableName, PenstockError] = {}
        waiting = [TableCopy(table, places) for table in tables]
        backoff = Backoff(_COORDINATOR_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while waiting and not is_stopping():
            due = [copy for copy in waiting if copy.is_due and events.attempts.is_due(copy.name)]
            if not due:
                _wait(_POLL_SECONDS, is_stopping)
                continue
            copying = self._next_round(source, due, lanes, events, is_awaited=len(due) < len(waiting))
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

    def _next_round(
        self,
        source: RoundSource,
        due: Sequence[TableCopy],
        lanes: int,
        events: RoundEvents,
        *,
        is_awaited: bool,
    ) -> SnapshotRound:
        """Create the next round. If the source uses a slot, and the copy of a small table was interrupted,
        this table is copied alone, under a lock (see `TableCopy.is_lockable`).
        """
        lockable = [copy for copy in due if copy.is_lockable] if self.slot is not None else []
        if lockable:
            return SnapshotRound(source, lockable[:1], 1, events, is_locking=True)
        return SnapshotRound(source, due, lanes, events, is_awaited=is_awaited)

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
            self.dead_letters,
            self.positions_are_polls,
        )


def _tried(copying: SnapshotRound) -> PenstockError | None:
    """Run a round. Returns the transient error that ended it early; None if it did not end early."""
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
