"""One round of copying: what several threads do under one exported snapshot, and what follows when a step of theirs fails.

The snapshot is let go as soon as nobody needs it any more: before the last commits, and before a repair's MERGE. Each thread runs one Spark
task at a time, so a chunk that fails takes nothing else with it, and epochs never wait behind more than one chunk for each core.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark import InheritableThread

from penstock.errors import (
    CaptureFailedError,
    LockWaitError,
    PenstockError,
    Recovery,
    SlotLostError,
    SnapshotLostError,
    SnapshotTaskError,
    TableRewrittenError,
)
from penstock.lag import OpenTransaction
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.snapshots.copy import TableCopy
from penstock.pipeline.snapshots.schedule import Schedule, Step, Turn
from penstock.position import Position
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.exported import Export, ExportedSnapshot, export_snapshot
from penstock.postgres.outline import inspect_sizes
from penstock.postgres.slot import OnWait, check_slot, inspect_server, inspect_slot
from penstock.schema import TableName

_log = logging.getLogger("penstock.snapshot")

_RESTARTS = 5
_FAULTS = 5
_PAUSE_SECONDS = 1.0
_LOCK_PAUSE_SECONDS = 10.0
_WATCH_SECONDS = 5.0

# What is not the fault of the table that met it: the pipeline as a whole has to answer for it.
_EVERYBODYS = (CaptureFailedError, SlotLostError)


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


class _StoppedError(Exception):
    """The run is to end; what is not finished is taken up by the next one."""


class SnapshotRound:
    """`run` it once. Afterwards it says which tables are finished and which have failed; all others wait for the next round."""

    def __init__(self, source: RoundSource, copies: Sequence[TableCopy], lanes: int, events: RoundEvents) -> None:
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
            with self._source.export(self._source.address, self._tell_wait, sources) as exported:
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
        self.has_advanced = schedule.chunks_read > 0 or bool(self.finished)
        if self._fatal is not None:
            raise self._fatal

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
        self._source.on_wait(blockers)

    def _start_lane(self, number: int, schedule: Schedule[TableCopy], exported: ExportedSnapshot) -> threading.Thread:
        thread = InheritableThread(target=self._lane, args=(schedule, exported), name=f"penstock-chunks-{number}", daemon=True)
        thread.start()
        return thread

    def _lane(self, schedule: Schedule[TableCopy], exported: ExportedSnapshot) -> None:
        while (turn := schedule.take()) is not None:
            try:
                self._do(schedule, turn, exported)
            except PenstockError as error:
                self._answer(schedule, turn, error)
            except BaseException as error:  # noqa: BLE001 - a thread's edge: whoever started it raises this again
                self._abort(schedule, turn, error)

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
            self._events.on_finished(copy.name)
            schedule.advance(turn, Step.DONE)

    def _answer(self, schedule: Schedule[TableCopy], turn: Turn[TableCopy], error: PenstockError) -> None:
        """The one place that decides what follows."""
        copy = turn.lot.table
        if isinstance(error, TableRewrittenError):
            copy.doom(error.message)
            if copy.restarts >= _RESTARTS:
                self.failures[copy.name] = error
            schedule.drop(turn)
        elif isinstance(error, _EVERYBODYS) or error.recovery is Recovery.FATAL:
            self._abort(schedule, turn, error)
        elif error.recovery is Recovery.OPERATOR:
            self.failures[copy.name] = error
            schedule.drop(turn)
        elif isinstance(error, LockWaitError):
            self._tell_once(copy, error)
            schedule.put_back(turn, copy.chunk_bytes(turn.chunk), pause_seconds=_LOCK_PAUSE_SECONDS)
        elif isinstance(error, SnapshotTaskError) or turn.step is Step.COMMIT:
            self._try_again(schedule, turn, error)
        else:
            if not isinstance(error, SnapshotLostError):
                self._tell_once(copy, error)
            self.trouble = error
            schedule.put_back(turn, copy.chunk_bytes(turn.chunk))
            schedule.close()

    def _try_again(self, schedule: Schedule[TableCopy], turn: Turn[TableCopy], error: PenstockError) -> None:
        """What may have been bad luck is tried again; what fails again and again is left to those who started the round."""
        copy = turn.lot.table
        copy.faults += 1
        _log.warning("step of a snapshot failed", extra={"table": str(copy.name), "step": turn.step.value, "code": error.code})
        if copy.faults >= _FAULTS:
            self._abort(schedule, turn, error)
        else:
            schedule.put_back(turn, copy.chunk_bytes(turn.chunk), pause_seconds=_PAUSE_SECONDS)

    def _abort(self, schedule: Schedule[TableCopy], turn: Turn[TableCopy], error: BaseException) -> None:
        self._fatal = self._fatal or error
        schedule.drop(turn)
        schedule.close()

    def _tell_once(self, copy: TableCopy, error: PenstockError) -> None:
        if copy.name not in self._told:
            self._told.add(copy.name)
            self._events.observer.interrupted(str(error), _LOCK_PAUSE_SECONDS)
