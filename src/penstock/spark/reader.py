"""Stream readers over the spool, with the capture running inside them.

Spark keeps one reader alive in one driver-side Python process for each run of a query, so the capture's threads live there too: started by
the first call that needs them, ended with the process. Offsets are commit positions.

What Spark calls, and when, differs between versions; what holds on all of them: an `end` that was planned before `latestOffset` is called
again belongs to a finished batch, and so does the `start` of a range that is not empty. Only these are ever acknowledged. Spark 4.2 hands
the finished position in as `start`; on 4.1 it is the last `end` that `partitions` saw.
"""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from penstock.capture.choosing import open_capture
from penstock.capture.following import SpoolFollower
from penstock.capture.settings import CaptureSettings
from penstock.capture.thread import CaptureThread
from penstock.errors import ConnectionLostError
from penstock.logs import configure_from_environment
from penstock.position import Position
from penstock.postgres.connection import connect
from penstock.postgres.slot import current_position
from penstock.spark.admission import Admission, ReadMaxRows, SupportsTriggerAvailableNow
from penstock.spool.barriers import BarrierWatch
from penstock.spool.reader import SpoolReader

_LINGER_SECONDS = 0.2
_CATCH_UP_SECONDS = 3600.0
_AVAILABLE_NOW_QUIET_SECONDS = 0.2


def position_of(value: Mapping[str, str]) -> Position:
    return Position.parse(value["position"])


class SpoolStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Offsets, admission and the embedded capture. Subclasses say what a batch holds and when it is acknowledged."""

    def __init__(self, options: Mapping[str, str]) -> None:
        # Called twice, once only to be pickled: nothing may be opened here.
        self._options = {name.lower(): value for name, value in options.items()}
        self._admission = Admission.from_options(options)
        self._capture: CaptureThread | SpoolFollower | None = None
        self._spool: SpoolReader | None = None
        self._planned: Position | None = None
        self._goal: Position | None = None

    # Spark's API ------------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, str]:
        """Always the same, since Spark may ask again after a crash of the first batch. The targets know where they are."""
        return {"position": str(Position.ZERO)}

    def getDefaultReadLimit(self) -> Any:
        """Spark 4.2 and later. It passes on one kind of limit only; bytes are looked after here."""
        return ReadMaxRows(self._admission.rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """Spark 4.2 and later, before anything else: the query ends when it holds what has committed by now.

        It ends with the segment that holds the last of it. The server's own position would not do as an offset: it may lie inside a commit
        record, and confirming such a place would lose that transaction.
        """
        with connect(CaptureSettings.from_options(self._options).address) as connection:
            goal = current_position(connection)
        self._end_at(goal if self._goal is None else min(goal, self._goal))

    def latestOffset(self, start: Mapping[str, str] | None = None, limit: Any = None) -> dict[str, str]:
        """The first call after a finished batch, and the only one that acknowledges it. Never goes back, whatever the spool holds."""
        reached = position_of(start) if start is not None else self._planned or Position.ZERO
        if reached > Position.ZERO:
            self._acknowledge(reached)
        capture, spool = self._running(reached)
        self._waiting()
        if self._goal is None:
            capture.wait_beyond(reached, _LINGER_SECONDS)
        elif reached < self._goal:
            self._wait_until(min(self._goal, Position.of(reached.value + 1)))
        else:
            return self._offset(reached)
        if spool.start is None:
            return self._offset(reached)  # asked first: its first segment may come at any moment, and begins where it begins
        first = self._first(spool, reached)
        admission = self._admission.under(limit)
        planned = spool.limit(first, max_rows=admission.rows, max_bytes=admission.bytes, max_transactions=admission.transactions)
        if self._goal is not None:
            planned = min(planned, _segment_end_at(spool, self._goal) or planned)
        planned = self._cut(spool, first, planned)
        return self._offset(planned if planned > first else reached)

    def partitions(self, start: Mapping[str, str], end: Mapping[str, str]) -> Sequence[InputPartition]:
        self._planned = position_of(end)
        if start == end:
            return []
        _, spool = self._running(position_of(start))
        # After a crash the range was planned by an earlier process, and a lost spool may have to be captured again first.
        self._wait_until(self._planned)
        return self._plan(spool, self._first(spool, position_of(start)), self._planned)

    def commit(self, end: Mapping[str, str]) -> None:
        """Comes while the next batch is already being built, and never when idle: nothing is decided here."""

    def stop(self) -> None:
        if self._capture is not None:
            self._capture.stop()

    def _end_at(self, goal: Position) -> None:
        """Read nothing beyond the segment that holds `goal`. On a quiet database, it is reached when the server has vouched for it."""
        self._goal = goal
        self._options.setdefault("quietseconds", str(_AVAILABLE_NOW_QUIET_SECONDS))

    def _offset(self, position: Position) -> dict[str, str]:
        """Spark compares offsets as JSON text: one order of keys, one spelling."""
        return {"position": str(position)}

    # what subclasses say ------------------------------------------------------------------------------------------------------

    def _acknowledge(self, position: Position) -> None:
        """Every batch up to `position` is finished."""

    def _plan(self, spool: SpoolReader, start: Position, end: Position) -> Sequence[InputPartition]:
        return []

    def _first(self, spool: SpoolReader, reached: Position) -> Position:
        """Where to read on. A query that has never run begins where the spool begins."""
        begin = spool.start
        return begin if begin is not None and reached == Position.ZERO else reached

    def _cut(self, spool: SpoolReader, start: Position, planned: Position) -> Position:
        """Where a batch that is planned up to `planned` is to end instead; `start` if there is to be none now."""
        return planned

    def _prepare(self, settings: CaptureSettings, finished: Position) -> None:
        """Called once, before the capture starts; every batch up to `finished` is finished."""

    def _waiting(self) -> None:
        """Called whenever there may be nothing to read, and again and again while something is waited for."""

    # the capture ----------------------------------------------------------------------------------------------------------------

    def _running(self, finished: Position) -> tuple[CaptureThread | SpoolFollower, SpoolReader]:
        if self._capture is None or self._spool is None:
            configure_from_environment()
            settings = CaptureSettings.from_options(self._options)
            self._prepare(settings, finished)
            self._spool = SpoolReader(settings.spool)
            self._capture = SpoolFollower(settings) if settings.is_separate else open_capture(settings)
            _end_on_sigterm()
            # Whatever way this process takes out, the capture sends its last confirmation first: its thread is a daemon.
            atexit.register(self._capture.stop)
            self._capture.start()
        return self._capture, self._spool

    def _wait_until(self, position: Position) -> None:
        """Wait until the spool holds everything up to `position`, by our own capture or by another that holds the spool's lock."""
        assert self._capture is not None
        assert self._spool is not None
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        while not self._capture.wait_until(position, _LINGER_SECONDS):
            end = self._spool.end
            if end is not None and end >= position:
                return
            self._waiting()
            if time.monotonic() > deadline:
                raise ConnectionLostError(f"the capture did not get to {position} in {_CATCH_UP_SECONDS:.0f} s")


def _segment_end_at(spool: SpoolReader, position: Position) -> Position | None:
    """The first place at or after `position` where a batch may end."""
    return min((segment.end for segment in spool.segments() if segment.end >= position), default=None)


def _end_on_sigterm() -> None:
    """Spark ends this process with SIGTERM, which by default would leave the slot taken until the server notices.

    An exception instead unwinds to Spark's own loop, which calls `stop()` on its way out. Nothing is stopped here: a handler may run while
    this very thread holds the lock that stopping needs. Spark sends the signal twice, and only the first counts: the second finds the
    capture at its last confirmation, and would cut it short.
    """
    is_ending = False

    def end(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_ending
        if not is_ending:
            is_ending = True
            raise SystemExit(0)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


class ControlStreamReader(SpoolStreamReader):
    """The clock of a pipeline: its batches hold no rows, so no task runs; `foreachBatch` takes the range from the offset log.

    It never acknowledges: the pipeline releases what its targets hold, by itself. Its offsets also carry the run, so that every run begins
    with a batch, in which tables catch up that are behind the checkpoint.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._barriers = BarrierWatch(Path(self._options["barriers"])) if "barriers" in self._options else None

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        return iter(())

    def _offset(self, position: Position) -> dict[str, str]:
        return {"position": str(position), "run": self._options.get("run", "")}

    def _first(self, spool: SpoolReader, reached: Position) -> Position:
        """The pipeline looks for holes, by what its targets hold; a checkpoint older than the spool is no reason to stop."""
        begin = spool.start
        return begin if begin is not None and reached < begin else reached

    def _cut(self, spool: SpoolReader, start: Position, planned: Position) -> Position:
        return self._barriers.cut(spool, start, planned) if self._barriers is not None else planned
