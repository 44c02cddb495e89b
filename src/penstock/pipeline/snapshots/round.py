"""One round of copying: what several threads do under one exported snapshot, and what follows when a step of theirs fails.

The snapshot is let go as soon as nobody needs it any more: before the last commits, and before a repair's MERGE. Each thread runs one Spark
task at a time, so a chunk that fails takes nothing else with it, and epochs never wait behind more than one chunk for each core.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pyspark import InheritableThread

from penstock.errors import (
    ConnectionLostError,
    LockWaitError,
    PenstockError,
    SlotLostError,
    SnapshotLostError,
    TableRewrittenError,
)
from penstock.lag import OpenTransaction
from penstock.pipeline.error_policy import Action, TableRetries, Verdict, decide, final
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.snapshots.copy import TableCopy
from penstock.pipeline.snapshots.schedule import Schedule, Step, Turn
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import begin_locked, lock_tables
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.exported import Export, ExportedSnapshot, export_snapshot
from penstock.postgres.outline import inspect_sizes
from penstock.postgres.slot import OnWait, check_slot, inspect_server, inspect_slot
from penstock.schema import TableName

_log = logging.getLogger("penstock.snapshot")

_RESTARTS = 30
"""About four hours, by the pauses between them."""
_LOCK_PAUSE_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 1.0
_HELD_PAUSE_SECONDS = 10.0
"""A snapshot is not held for an attempt that comes later than this."""
_LOCKED_WAITS = 3
"""Seconds for which tables stay locked while others end their transactions."""
_WATCH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RoundSource:
    """Where the snapshot comes from, and how long it may be held."""

    address: SourceAddress
    slot: str | None
    on_wait: OnWait
    hold_seconds: float | None
    export: Export = export_snapshot


@dataclass(frozen=True, slots=True)
class RoundEvents:
    """Who is told, and who may end it."""

    observer: PipelineObserver
    on_fence: Callable[[TableName, Position], None]
    on_finished: Callable[[TableName], None]
    is_stopping: Callable[[], bool]
    retries: RetryLog = field(default_factory=RetryLog)
    """What is tried again, for status."""
    attempts: TableRetries = field(default_factory=TableRetries)


class _StoppedError(Exception):
    """The run is to end; what is not finished is taken up by the next one."""


class SnapshotRound:
    """`run` it once. Afterwards it says which tables are finished and which have failed; all others wait for the next round."""

    def __init__(
        self, source: RoundSource, copies: Sequence[TableCopy], lanes: int, events: RoundEvents, *, is_locking: bool = False
    ) -> None:
        """`is_locking`: the tables are locked before the snapshot is taken, and read in the session that locks them, by one lane."""
        self.is_locking = is_locking
        self._waits = 0
        self._counted: dict[TableName, float] = {}
        self._lock_waits: dict[TableName, int] = {}
        self._answering = threading.Lock()
        self._source = source
        self._copies = copies
        self._lanes = lanes
        self._events = events
        self._fatal: BaseException | None = None
        self._told: set[TableName] = set()
        self.finished: set[TableCopy] = set()
        self.failures: dict[TableName, PenstockError] = {}
        self.trouble: PenstockError | None = None
        """What ended the round early, and may not be there in the next."""
        self.has_advanced = False

    def run(self) -> None:
        """Raises what the tables are not to blame for."""
        self._check_slot()
        sources = [source for copy in self._copies for source in copy.table.sources]
        with connect(self._source.address) as connection:
            sizes = inspect_sizes(connection, [source.oid for source in sources])
        threads: list[threading.Thread] = []
        try:
            with self._locked(sources) as session, self._source.export(self._source.address, self._tell_wait, sources) as exported:
                self._import(session, exported)
                schedule = Schedule(
                    [(copy, sum(sizes.get(source.oid, 0) for source in copy.table.sources)) for copy in self._copies],
                    is_stopping=self._events.is_stopping,
                    hold_seconds=self._source.hold_seconds,
                )
                threads += [self._start_lane(number, schedule, exported) for number in range(self._lanes)]
                self._watch(schedule)
            _log.info("snapshot let go", extra={"fence": str(exported.fence), "is_expired": schedule.is_expired})
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
        """The lock, or a snapshot under it, was not to be had: these tables wait, the others do not."""
        for copy in self._copies:
            copy.back_off()
            self._events.observer.interrupted(str(error), copy.restarts.seconds)
            self._events.retries.note(_subject(copy), error, copy.restarts.failures, copy.restarts.seconds)

    def _watch(self, schedule: Schedule[TableCopy]) -> None:
        """Until the snapshot is not needed any more, see that there is a log to go on with afterwards."""
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
        """A slot that the server gave up, having kept as much of its log as it is told to keep, makes every copy worthless."""
        if self._source.slot is None:
            return
        with connect(self._source.address) as connection:
            slot = inspect_slot(connection, self._source.slot)
            if slot is not None:
                check_slot(slot, inspect_server(connection).database)

    def _tell_wait(self, blockers: Sequence[OpenTransaction]) -> None:
        if self._events.is_stopping():
            raise _StoppedError
        self._waits += 1
        if self.is_locking and self._waits > _LOCKED_WAITS:
            # One of them may wait for the lock, and nobody but us would ever know that both wait for each other.
            raise LockWaitError(f"{self._copies[0].name} is not kept locked while other transactions are open")
        self._source.on_wait(blockers)

    def _start_lane(self, number: int, schedule: Schedule[TableCopy], exported: ExportedSnapshot) -> threading.Thread:
        thread = InheritableThread(target=self._lane, args=(schedule, exported), name=f"penstock-chunks-{number}", daemon=True)
        thread.start()
        return thread

    def _lane(self, schedule: Schedule[TableCopy], exported: ExportedSnapshot) -> None:
        while (turn := schedule.take()) is not None:
            started = time.monotonic()
            try:
                self._take_turn(schedule, turn, exported, started)
            except BaseException as error:  # noqa: BLE001 - a thread's edge: `run` raises it again
                self._abort(schedule, turn, error)

    def _take_turn(self, schedule: Schedule[TableCopy], turn: Turn[TableCopy], exported: ExportedSnapshot, started: float) -> None:
        try:
            self._do(schedule, turn, exported)
        except Exception as error:  # noqa: BLE001 - the edge of one table's work: the error policy decides
            with self._answering:
                self._answer(schedule, turn, error, started)
        else:
            self._events.attempts.succeed(turn.lot.table.name)

    def _do(self, schedule: Schedule[TableCopy], turn: Turn[TableCopy], exported: ExportedSnapshot) -> None:
        copy = turn.lot.table
        if turn.step is Step.OPEN:
            chunks = copy.open(exported)
            self._events.on_fence(copy.name, copy.plan.fence)
            schedule.opened(turn, chunks, then=copy.then(exported))
        elif turn.step is Step.CHUNK:
            copy.read(exported, turn.chunk)
            schedule.read(turn, copy.chunk_bytes(turn.chunk), then=copy.then(exported))
        elif turn.step is Step.REREAD:
            if copy.reread(exported):
                schedule.advance(turn, Step.COMMIT)
            else:
                schedule.drop(turn)
        else:
            copy.commit()
            self.finished.add(copy)
            self._events.retries.clear(_subject(copy))
            self._events.on_finished(copy.name)
            schedule.advance(turn, Step.DONE)

    def _answer(self, schedule: Schedule[TableCopy], turn: Turn[TableCopy], error: Exception, started: float) -> None:
        """What follows an error of one step, by the error policy. A snapshot that is lost, or a lock, is no fault of the table."""
        copy = turn.lot.table
        if isinstance(error, TableRewrittenError):
            self._start_again(schedule, turn, error)
        elif isinstance(error, LockWaitError):
            self._tell_once(copy, error)
            self._lock_waits[copy.name] = self._lock_waits.get(copy.name, 0) + 1
            hint = f"end the session that holds a lock on {copy.name} (pg_locks, pg_stat_activity), or wait for it"
            shown = LockWaitError(error.message, hint=error.hint or hint)
            self._events.retries.note(_subject(copy), shown, self._lock_waits[copy.name], _LOCK_PAUSE_SECONDS)
            schedule.put_back(turn, copy.chunk_bytes(turn.chunk), pause_seconds=_LOCK_PAUSE_SECONDS)
        elif isinstance(error, SnapshotLostError):
            self.trouble = error
            schedule.put_back(turn, copy.chunk_bytes(turn.chunk))
            schedule.close()
        else:
            verdict = decide(error, copy.name, "copying")
            if verdict.action is Action.STOP:
                self._abort(schedule, turn, verdict.error)
            elif verdict.action is Action.FAIL_TABLE:
                self._give_up(schedule, turn, verdict.error)
            else:
                self._try_again(schedule, turn, verdict, started)

    def _start_again(self, schedule: Schedule[TableCopy], turn: Turn[TableCopy], error: TableRewrittenError) -> None:
        """The table is planned again in a later round, after a pause that grows; a small one is locked then."""
        copy = turn.lot.table
        copy.doom(error.message)
        hint = f"pause the job that empties or alters {copy.name} for as long as one copy takes"
        shown = TableRewrittenError(error.message, hint=hint)
        if copy.restarts.failures >= _RESTARTS:
            self._give_up(schedule, turn, final(shown, copy.name))
        else:
            pause = max(0.0, copy.restarts_at - time.monotonic())
            self._events.retries.note(_subject(copy), shown, copy.restarts.failures, pause)
            schedule.drop(turn)

    def _try_again(self, schedule: Schedule[TableCopy], turn: Turn[TableCopy], verdict: Verdict, started: float) -> None:
        """The step is tried again; steps of one table that failed side by side count once."""
        copy, error = turn.lot.table, verdict.error
        pause: float | None = _FIRST_PAUSE_SECONDS
        if started >= self._counted.get(copy.name, 0.0):
            self._counted[copy.name] = time.monotonic()
            pause = self._events.attempts.count(copy.name, verdict)
        _log.warning("step of a snapshot failed", extra={"table": str(copy.name), "step": turn.step.value, "code": error.code})
        if pause is None:
            self._give_up(schedule, turn, final(error, copy.name))
            return
        self._events.retries.note(_subject(copy), final(error, copy.name), self._events.attempts.failures(copy.name), pause)
        if isinstance(error, ConnectionLostError):
            self._tell_once(copy, error)
            self.trouble = error
            schedule.put_back(turn, copy.chunk_bytes(turn.chunk))
            schedule.close()
        elif pause <= _HELD_PAUSE_SECONDS:
            schedule.put_back(turn, copy.chunk_bytes(turn.chunk), pause_seconds=pause)
        else:
            self._tell_once(copy, error)
            schedule.drop(turn)

    def _give_up(self, schedule: Schedule[TableCopy], turn: Turn[TableCopy], error: PenstockError) -> None:
        copy = turn.lot.table
        self.failures[copy.name] = error
        self._events.retries.clear(_subject(copy))
        schedule.drop(turn)

    def _abort(self, schedule: Schedule[TableCopy], turn: Turn[TableCopy], error: BaseException) -> None:
        self._fatal = self._fatal or error
        schedule.drop(turn)
        schedule.close()

    def _tell_once(self, copy: TableCopy, error: PenstockError) -> None:
        if copy.name not in self._told:
            self._told.add(copy.name)
            self._events.observer.interrupted(str(error), _LOCK_PAUSE_SECONDS)


def _subject(copy: TableCopy) -> str:
    return f"snapshot of {copy.name}"
