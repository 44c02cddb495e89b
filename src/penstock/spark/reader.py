"""Stream readers over the spool, with the capture running inside them.

Spark keeps one reader alive in one driver-side Python process for each run of a query, so the capture's threads live there too: started by the
first call that needs them, ended with the process. Offsets are commit positions.

What Spark calls, and when, differs between versions; what holds on all of them: an `end` that was planned before `latestOffset` is called again
belongs to a finished batch. So `latestOffset` is the only place that acknowledges. Spark 4.2 hands the finished position in as `start`; on 4.1
it is the last `end` that `partitions` saw.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from penstock.capture.settings import CaptureSettings
from penstock.capture.wal import WalCapture
from penstock.errors import ConnectionLostError
from penstock.position import Position
from penstock.schema import TableName
from penstock.spark.changes import read_changes
from penstock.spool.consumers import release
from penstock.spool.reader import FileSlice, SpoolReader

try:  # Spark 4.2 and later
    from pyspark.sql.streaming.datasource import ReadAllAvailable
except ImportError:  # Spark 4.1 has no read limits

    class ReadAllAvailable:  # type: ignore[no-redef]
        """Never given by a Spark that lacks it."""


_LINGER_SECONDS = 0.2
_CATCH_UP_SECONDS = 3600.0


def position_of(value: Mapping[str, str]) -> Position:
    return Position.parse(value["position"])


@dataclass(frozen=True, slots=True)
class Admission:
    """The most that one batch takes in, counted in whole segments; at least one segment is always admitted."""

    rows: int = 1_000_000
    bytes: int = 1 << 30

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Admission:
        folded = {name.lower(): value for name, value in options.items()}
        default = cls()
        return cls(int(folded.get("maxrowsperbatch", default.rows)), int(folded.get("maxbytesperbatch", default.bytes)))


class SpoolStreamReader(DataSourceStreamReader):
    """Offsets, admission and the embedded capture. Subclasses say what a batch holds and when it is acknowledged."""

    def __init__(self, options: Mapping[str, str]) -> None:
        # Called twice, once only to be pickled: nothing may be opened here.
        self._options = dict(options)
        self._capture: WalCapture | None = None
        self._spool: SpoolReader | None = None
        self._planned: Position | None = None

    # Spark's API ------------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, str]:
        """Always the same, since Spark may ask again after a crash of the first batch. The targets know where they are."""
        return {"position": str(Position.ZERO)}

    def latestOffset(self, start: Mapping[str, str] | None = None, limit: Any = None) -> dict[str, str]:
        capture, spool = self._running()
        reached = position_of(start) if start is not None else self._planned or Position.ZERO
        if reached > Position.ZERO:
            self._acknowledge(reached)
        capture.wait_beyond(reached, _LINGER_SECONDS)
        end = spool.end
        if end is None or end <= reached:
            return self._offset(reached)
        if isinstance(limit, ReadAllAvailable):
            return self._offset(end)
        admission = Admission.from_options(self._options)
        first = self._first(spool, reached)
        return self._offset(spool.limit(first, max_rows=admission.rows, max_bytes=admission.bytes))

    def partitions(self, start: Mapping[str, str], end: Mapping[str, str]) -> Sequence[InputPartition]:
        self._planned = position_of(end)
        if start == end:
            return []
        capture, spool = self._running()
        # After a crash the range was planned by an earlier process, and a lost spool may have to be captured again first.
        if not capture.wait_until(self._planned, _CATCH_UP_SECONDS):
            raise ConnectionLostError(f"the capture did not get back to {self._planned} in {_CATCH_UP_SECONDS:.0f} s")
        return self._plan(spool, self._first(spool, position_of(start)), self._planned)

    def commit(self, end: Mapping[str, str]) -> None:
        """Comes while the next batch is already being built, and never when idle: nothing is decided here."""

    def stop(self) -> None:
        if self._capture is not None:
            self._capture.stop()

    def _offset(self, position: Position) -> dict[str, str]:
        """Spark compares offsets as JSON text: one order of keys, one spelling."""
        return {"position": str(position)}

    # what subclasses say ------------------------------------------------------------------------------------------------------

    def _acknowledge(self, position: Position) -> None:
        """Every batch up to `position` is finished."""

    def _plan(self, spool: SpoolReader, start: Position, end: Position) -> Sequence[InputPartition]:
        return []

    def _first(self, spool: SpoolReader, reached: Position) -> Position:
        """A query that has never run begins where the spool begins."""
        begin = spool.start
        return begin if begin is not None and reached == Position.ZERO else reached

    def _running(self) -> tuple[WalCapture, SpoolReader]:
        if self._capture is None or self._spool is None:
            settings = CaptureSettings.from_options(self._options)
            self._prepare(settings)
            self._spool = SpoolReader(settings.spool)
            self._capture = WalCapture(settings)
            self._stop_on_sigterm(self._capture)
            self._capture.start()
        return self._capture, self._spool

    def _prepare(self, settings: CaptureSettings) -> None:
        """Called once, before the capture starts."""

    def _stop_on_sigterm(self, capture: WalCapture) -> None:
        """Spark ends this process with SIGTERM and calls nothing else: release the slot at once, not when the server notices."""
        if threading.current_thread() is not threading.main_thread():
            return

        def end(_signal: int, _frame: FrameType | None) -> None:
            capture.stop()
            raise SystemExit(0)

        signal.signal(signal.SIGTERM, end)


class ControlStreamReader(SpoolStreamReader):
    """The clock of a pipeline: its batches hold no rows, so no task runs; `foreachBatch` takes the range from the offset log.

    It never acknowledges: the pipeline releases what its targets hold, by itself. Its offsets also carry the run, so that every run begins
    with a batch, in which tables catch up that are behind the checkpoint.
    """

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        return iter(())

    def _offset(self, position: Position) -> dict[str, str]:
        return {"position": str(position), "run": self._options.get("run", "")}

    def _first(self, spool: SpoolReader, reached: Position) -> Position:
        """The pipeline looks for holes, by what its targets hold; a checkpoint older than the spool is no reason to stop."""
        begin = spool.start
        return begin if begin is not None and reached < begin else reached


@dataclass
class SlicePartition(InputPartition):
    """One file of one segment; read by one task."""

    slice: FileSlice


class ChangeStreamReader(SpoolStreamReader):
    """The typed changes of one table. What Spark has committed is released to the capture."""

    def __init__(self, options: Mapping[str, str], table: TableName, consumer: str, schema: pa.Schema) -> None:
        super().__init__(options)
        self._table = table
        self._consumer = consumer
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SlicePartition)
        return read_changes(partition.slice, self._schema)

    def _prepare(self, settings: CaptureSettings) -> None:
        release(settings.spool, self._consumer, Position.ZERO)

    def _acknowledge(self, position: Position) -> None:
        release(CaptureSettings.from_options(self._options).spool, self._consumer, position)

    def _plan(self, spool: SpoolReader, start: Position, end: Position) -> Sequence[InputPartition]:
        changes = spool.read(start, end).tables.get(self._table)
        return [SlicePartition(slice) for slice in changes.slices] if changes is not None else []
