"""Stream readers of the spool, which run the capture or follow a separate one.

For each run of a query, Spark keeps one reader in one Python process on the driver. The capture's threads run
in that process: the first call that needs them starts them, and they end with the process. Offsets are commit
positions.

The order of Spark's calls differs between versions. In all versions, two kinds of positions belong to
finished batches: every `end` that `partitions` received before Spark calls `latestOffset`, and the `start` of
a range that is not empty. Only these positions are acknowledged. Spark 4.2 passes the finished position to
`latestOffset` as `start`. Spark 4.1 does not; there it is the last `end` that `partitions` received.
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

from penstock.capture.factory import SpoolFollower, open_capture
from penstock.capture.settings import CaptureSettings
from penstock.capture.thread import CaptureThread
from penstock.errors import ConnectionLostError
from penstock.logs import configure_from_environment
from penstock.position import Position
from penstock.postgres.connection import connect
from penstock.postgres.slot import current_position
from penstock.spark.options import Admission, ReadMaxRows, SupportsTriggerAvailableNow
from penstock.spool.barriers import BarrierWatch
from penstock.spool.reader import SpoolReader

_LINGER_SECONDS = 0.2
_CATCH_UP_SECONDS = 3600.0
_AVAILABLE_NOW_QUIET_SECONDS = 0.2


def position_of(value: Mapping[str, str]) -> Position:
    return Position.parse(value["position"])


class SpoolStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Implements the offsets, the limits of a batch and the embedded capture. Subclasses define the content
    of a batch and when it is acknowledged.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        # Spark creates this object twice, once only to pickle it: open nothing here.
        self._options = {name.lower(): value for name, value in options.items()}
        self._admission = Admission.from_options(options)
        self._capture: CaptureThread | SpoolFollower | None = None
        self._spool: SpoolReader | None = None
        self._planned: Position | None = None
        self._goal: Position | None = None

    # Spark's API
    # --------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, str]:
        """Position zero in every run, since Spark may call this again after a crash in the first batch. It is
        not the start of a pipeline, whose targets store their positions.
        """
        return {"position": str(Position.ZERO)}

    def getDefaultReadLimit(self) -> Any:
        """The default limit on rows, for Spark 4.2 and later. Spark supports only one kind of limit, so this
        class itself applies the limits on bytes and transactions.
        """
        return ReadMaxRows(self._admission.rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """Called by Spark 4.2 and later, before any other method. The query ends after it has read every
        transaction that is committed at the time of this call.

        The query's last offset is the end of the segment with the last of these transactions. The server's
        current position cannot be an offset: it may be inside a commit record, and confirming it would lose
        that transaction.
        """
        with connect(CaptureSettings.from_options(self._options).address) as connection:
            goal = current_position(connection)
        self._end_at(goal if self._goal is None else min(goal, self._goal))

    def latestOffset(self, start: Mapping[str, str] | None = None, limit: Any = None) -> dict[str, str]:
        """The end offset of the next batch, never before the end of the previous batch. The first call after
        a batch has finished acknowledges that batch.
        """
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
            return self._offset(
                reached
            )  # before the first segment is read, which may be sealed at any moment
        first = self._first(spool, reached)
        admission = self._admission.under(limit)
        planned = spool.limit(
            first, max_rows=admission.rows, max_bytes=admission.bytes, max_transactions=admission.transactions
        )
        if self._goal is not None:
            planned = min(planned, _segment_end_at(spool, self._goal) or planned)
        planned = self._cut(spool, first, planned)
        return self._offset(planned if planned > first else reached)

    def partitions(self, start: Mapping[str, str], end: Mapping[str, str]) -> Sequence[InputPartition]:
        self._planned = position_of(end)
        if start == end:
            return []
        _, spool = self._running(position_of(start))
        # After a crash, the range may have been planned by an earlier process. If the spool was lost since
        # then, the changes first have to be captured again.
        self._wait_until(self._planned)
        return self._plan(spool, self._first(spool, position_of(start)), self._planned)

    def commit(self, end: Mapping[str, str]) -> None:
        """Does nothing: Spark calls it while the next batch is being built, and never while the query is
        idle.
        """

    def stop(self) -> None:
        if self._capture is not None:
            self._capture.stop()

    def _end_at(self, goal: Position) -> None:
        """End the query at the end of the segment that contains `goal`. On an idle database, the goal is
        reached when the server reports that no other transaction commits before it.
        """
        self._goal = goal
        self._options.setdefault("quietseconds", str(_AVAILABLE_NOW_QUIET_SECONDS))

    def _offset(self, position: Position) -> dict[str, str]:
        """The offset for a position. Spark compares offsets as JSON text, so the key order and the format are
        fixed.
        """
        return {"position": str(position)}

    # --- for subclasses -------------------------------------------------------------------------------------

    def _acknowledge(self, position: Position) -> None:
        """Called when Spark has finished every batch up to `position`."""

    def _plan(self, spool: SpoolReader, start: Position, end: Position) -> Sequence[InputPartition]:
        return []

    def _first(self, spool: SpoolReader, reached: Position) -> Position:
        """The position to read from. A new query starts at the beginning of the spool."""
        begin = spool.start
        return begin if begin is not None and reached == Position.ZERO else reached

    def _cut(self, spool: SpoolReader, start: Position, planned: Position) -> Position:
        """The end of the next batch, for which the limits allow at most `planned`. A subclass may return an
        earlier position, or `start` to start no batch now.
        """
        return planned

    def _prepare(self, settings: CaptureSettings, finished: Position) -> None:
        """Called once, before the capture starts. Spark has finished every batch up to `finished`."""

    def _waiting(self) -> None:
        """Called repeatedly while the reader waits for changes."""

    # the capture
    # --------------------------------------------------------------------------------------------------------

    def _running(self, finished: Position) -> tuple[CaptureThread | SpoolFollower, SpoolReader]:
        if self._capture is None or self._spool is None:
            configure_from_environment()
            settings = CaptureSettings.from_options(self._options)
            self._prepare(settings, finished)
            self._spool = SpoolReader(settings.spool)
            self._capture = SpoolFollower(settings) if settings.is_separate else open_capture(settings)
            _end_on_sigterm()
            # However this process exits, stop the capture, which then sends its last confirmation: its thread
            # is a daemon.
            atexit.register(self._capture.stop)
            self._capture.start()
        return self._capture, self._spool

    def _wait_until(self, position: Position) -> None:
        """Wait until the spool has everything up to `position`, from this capture or from another one with
        the spool's lock.
        """
        assert self._capture is not None
        assert self._spool is not None
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        while not self._capture.wait_until(position, _LINGER_SECONDS):
            end = self._spool.end
            if end is not None and end >= position:
                return
            self._waiting()
            if time.monotonic() > deadline:
                raise ConnectionLostError(
                    f"the capture did not reach {position} within {_CATCH_UP_SECONDS:.0f} s"
                )


def _segment_end_at(spool: SpoolReader, position: Position) -> Position | None:
    """The end of the first segment that ends at or after `position`; None if there is no such segment yet."""
    return min((segment.end for segment in spool.segments() if segment.end >= position), default=None)


def _end_on_sigterm() -> None:
    """Install a handler that raises SystemExit on SIGTERM, the signal with which Spark ends this process.
    Without the handler, the slot would stay active until the server notices that this process is gone.

    The exception unwinds to Spark's loop, which calls `stop()`. The handler itself does not stop the capture:
    it may run while this thread holds the lock that stopping needs. Spark sends the signal twice. The handler
    ignores the second signal, which would interrupt the capture's last confirmation.
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
    """Triggers epochs: its batches have no rows, so no task runs. `foreachBatch` takes the range from the
    offset log.

    It never acknowledges batches: the pipeline releases the positions that its targets have reached. Its
    offsets contain the run's id, so every run begins with a batch. In this batch, tables catch up whose
    applied position is before the position in Spark's checkpoint.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._barriers = (
            BarrierWatch(Path(self._options["barriers"])) if "barriers" in self._options else None
        )

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        return iter(())

    def _offset(self, position: Position) -> dict[str, str]:
        return {"position": str(position), "run": self._options.get("run", "")}

    def _first(self, spool: SpoolReader, reached: Position) -> Position:
        """The position to read from: `reached`, or the beginning of the spool if that is later. The pipeline
        itself detects holes, from the positions of its targets.
        """
        begin = spool.start
        return begin if begin is not None and reached < begin else reached

    def _cut(self, spool: SpoolReader, start: Position, planned: Position) -> Position:
        return self._barriers.cut(spool, start, planned) if self._barriers is not None else planned
