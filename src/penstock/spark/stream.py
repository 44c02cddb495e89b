"""The streams that users read: the changes of one table, typed, or of many, as envelopes; with a snapshot first.

Where a new query begins, `startingPosition` says, and the first offset keeps it: Spark may repeat the first batch in another process. A
snapshot comes in batches of blocks, read under an exported snapshot that this process holds; then the changes after its fence, from the
spool. The order that makes it whole is publication, slot, fence: all that commits after the fence is in the slot, and stays there until
Spark has committed it, since this consumer's release is the fence as long as the snapshot lasts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.capture.following import missing_capture
from penstock.capture.settings import CaptureSettings
from penstock.change import change_schema
from penstock.errors import SpoolGapError
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.spark import options as declared
from penstock.spark.admission import Admission, ReadAllAvailable
from penstock.spark.beginning import begin_now, check_owner, choose_tables, ensure_source, hold_from, own_words
from penstock.spark.changes import check_shape, plan_tasks, read_changes, read_envelopes
from penstock.spark.envelope import to_envelopes
from penstock.spark.membership import TableWatch
from penstock.spark.offsets import ANEW, GIVEN, ChangeOffset
from penstock.spark.reader import SpoolStreamReader, position_of
from penstock.spark.request import SourceRequest
from penstock.spark.snapshots import ChunkPartition, StreamSnapshot, read_snapshot
from penstock.spool.consumers import hold, release
from penstock.spool.lock import ConsumerLock
from penstock.spool.reader import FileSlice, SpoolReader
from penstock.spool.values import check_values
from penstock.worker import settle_worker

_log = logging.getLogger(__name__)

_ENDING_SECONDS = 30.0
"""How long an earlier run of the query may take to end: its last confirmation is waited for."""
_PATIENCE_SECONDS = 60.0


@dataclass
class SlicePartition(InputPartition):
    """Some files, or parts of them, in order; read by one task."""

    slices: tuple[FileSlice, ...]


class ChangeStreamReader(SpoolStreamReader):
    """The changes of the chosen tables. What Spark has committed is released to the capture. Subclasses say what a row looks like."""

    def __init__(self, request: SourceRequest) -> None:
        super().__init__(request.options)
        self._request = request
        self._admission = request.admission
        self._last = ChangeOffset.INITIAL
        self._begun: ChangeOffset | None = None
        self._snapshot: StreamSnapshot | None = None
        self._is_owner_known = False
        self._lock: ConsumerLock | None = None
        self._tables = TableWatch(request)
        self._missing_since: float | None = None
        self._given = request.start if isinstance(request.start, Position) else None
        if request.end is not None:
            self._end_at(request.end)

    # Spark's API ------------------------------------------------------------------------------------------------------------

    def latestOffset(self, start: Mapping[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        with own_words(self._request.capture()):
            return self._next(start, limit)

    def _next(self, start: Mapping[str, Any] | None, limit: Any) -> dict[str, Any]:
        reached = ChangeOffset.parse(start) if start is not None else self._last
        if reached == ChangeOffset.INITIAL:
            self._begun = self._begun or self._begin(limit)
            if self._begun != reached:
                return self._begun.to_document()
        self._claim(self._request.capture())
        self._tables.check()
        if reached.chunk is not None:
            return self._admitted(reached, limit).to_document()
        if self._snapshot is not None:  # its last batch is finished
            self._snapshot.close()
        self._note_given(reached)
        self._settle_goal(reached.position)
        position = position_of(super().latestOffset(start, limit))
        if position == reached.position:
            return reached.to_document()
        return ChangeOffset(position, begins=declared.SLOT if reached == ChangeOffset.INITIAL else None).to_document()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        first, last = ChangeOffset.parse(start), ChangeOffset.parse(end)
        self._last, self._planned = last, last.position
        self._note_given(first)
        self._note_given(last)
        if first == last:
            return []
        with own_words(self._request.capture()):
            return self._parts(start, end, first, last)

    def _parts(self, start: Mapping[str, Any], end: Mapping[str, Any], first: ChangeOffset, last: ChangeOffset) -> Sequence[InputPartition]:
        if first == ChangeOffset.INITIAL and self._begins(last) == declared.SLOT:
            return super().partitions(start, end)
        if first == ChangeOffset.INITIAL or first.chunk is not None:
            self._running(last.position)
            return self._steps(first, last)
        return super().partitions(start, end)

    def stop(self) -> None:
        super().stop()
        if self._snapshot is not None:
            self._snapshot.close()
        if self._lock is not None:
            self._lock.release()

    # the beginning --------------------------------------------------------------------------------------------------------------

    def _begin(self, limit: Any) -> ChangeOffset:
        """What the first batch ends at: the place where the query begins, or the first blocks of a snapshot."""
        request, settings = self._request, self._request.capture()
        self._claim(settings)
        if settings.is_separate and (missing := missing_capture(settings.spool)) is not None:
            raise missing
        start = request.start
        if isinstance(start, Position):
            hold_from(settings, request.consumer, start)
        ensure_source(request)
        self._tables.begin(anew=start != declared.SLOT)
        if start == declared.SLOT:
            return ChangeOffset.INITIAL
        if start == declared.NOW:
            position = begin_now(settings)
            self._running(position)
            return ChangeOffset(position, begins=declared.NOW)
        if isinstance(start, Position):
            self._running(start)
            return ChangeOffset(start, begins=GIVEN)
        self._running(Position.ZERO)
        plan = self._snapshots.begin()
        self._claim(settings)
        release(settings.spool, request.consumer, plan.fence)
        first = self._admitted(ChangeOffset(plan.fence, 0), limit)
        return first if first.chunk is not None else replace(first, begins=declared.SNAPSHOT)

    def _begins(self, last: ChangeOffset) -> str | Position:
        """How the query began whose first batch ends at `last`."""
        if last.chunk is not None:
            return declared.SNAPSHOT
        return last.begins or self._request.start

    def _note_given(self, offset: ChangeOffset) -> None:
        if offset.begins == GIVEN:
            self._given = offset.position

    def _admitted(self, reached: ChangeOffset, limit: Any) -> ChangeOffset:
        """The end of the next batch of blocks."""
        assert reached.chunk is not None
        capture, _ = self._running(reached.position)
        capture.wait_until(Position.ZERO, 0.0)  # raises what ended it, if it has ended
        plan = self._snapshots.plan(reached.position)
        admission = Admission(None, None) if isinstance(limit, ReadAllAvailable) else self._request.snapshot_admission
        upto = plan.admit(reached.chunk, admission.rows, admission.bytes)
        return ChangeOffset(reached.position, None if upto == len(plan.steps) else upto)

    def _steps(self, first: ChangeOffset, last: ChangeOffset) -> Sequence[InputPartition]:
        """The blocks of a batch; none if all that it says is where the query begins."""
        fence = last.position
        is_mere_place = first.chunk is None and self._begins(last) != declared.SNAPSHOT
        if is_mere_place and (last.begins is not None or not self._snapshots.knows(fence)):
            return []
        return self._snapshots.partitions(fence, first.chunk or 0, last.chunk)

    @property
    def _snapshots(self) -> StreamSnapshot:
        if self._snapshot is None:
            request = self._request
            self._snapshot = StreamSnapshot(request, lambda connection: choose_tables(connection, request), self._check_schema)
        return self._snapshot

    def _claim(self, settings: CaptureSettings) -> None:
        """Before anything in the spool is read or released: it must be this source's, and nobody else may read it under this name.

        Again and again until somebody has captured into it: that may be somebody else, who began at the same moment.
        """
        self._is_owner_known = self._is_owner_known or check_owner(settings)
        self._lock = self._lock or ConsumerLock(settings.spool, self._request.consumer)
        self._lock.wait(_ENDING_SECONDS)

    def _settle_goal(self, reached: Position) -> None:
        """A query that is to end does so where the rows of its snapshot are of one moment, not before."""
        if self._goal is not None:
            settled = self._snapshots.settled(reached)
            self._goal = max(self._goal, settled) if settled > reached else self._goal

    def _check_schema(self, schema: TableSchema) -> None:
        """Raise unless tables of this shape may be in the stream."""

    # what the base asks --------------------------------------------------------------------------------------------------------

    def _waiting(self) -> None:
        """A capture of its own comes and goes by itself, and is waited for; but not for ever by a query that is to end."""
        settings = self._request.capture()
        missing = missing_capture(settings.spool) if settings.is_separate else None
        if missing is None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
            _log.warning("capture is not running", extra={"code": missing.code, "reason": missing.message, "fix": missing.hint})
        elif self._goal is not None and time.monotonic() - self._missing_since > _PATIENCE_SECONDS:
            raise missing

    def _prepare(self, settings: CaptureSettings, finished: Position) -> None:
        self._claim(settings)
        self._tables.check()
        # Before the capture starts, so that it can tell whether the slot has moved past what this query holds. Its checkpoint may have been
        # put back; then it needs more again than it did.
        consumer, safe = self._request.consumer, self._safe(finished)
        if Position.ZERO < safe < release(settings.spool, consumer, Position.ZERO):
            hold(settings.spool, consumer, safe)
        self._acknowledge(finished)

    def _acknowledge(self, position: Position) -> None:
        release(self._request.capture().spool, self._request.consumer, self._safe(position))

    def _safe(self, position: Position) -> Position:
        """A position that a person gave may lie inside a commit record, and confirming such a place would lose that commit."""
        return Position.ZERO if position == self._given else position

    def _first(self, spool: SpoolReader, reached: Position) -> Position:
        """A query that begins with the slot begins where the spool does, or where an earlier query of the same consumer has got to."""
        begin = super()._first(spool, reached)
        return begin if reached > Position.ZERO else max(begin, release(spool.root, self._request.consumer, Position.ZERO))

    def _plan(self, spool: SpoolReader, start: Position, end: Position) -> Sequence[InputPartition]:
        if start >= end:
            raise SpoolGapError(f"the batch up to {end} cannot be repeated: what is left of its changes begins at {start}", hint=ANEW)
        found: list[InputPartition] = []
        capture = self._request.capture()
        for table, changes in spool.read(start, end).tables.items():
            if self._request.choice.selects(table):
                slices = changes.with_old if capture.old_rows else changes.slices
                check_values(table, slices, refuse_inexact=capture.types.refuses_inexact)
                found += [SlicePartition(task) for task in plan_tasks(slices)]
        return found


class TableStreamReader(ChangeStreamReader):
    """One table: its own columns, typed, and the metadata of each change."""

    def __init__(self, request: SourceRequest, schema: pa.Schema) -> None:
        super().__init__(request)
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        settle_worker()
        if isinstance(partition, ChunkPartition):
            return read_snapshot(partition)
        assert isinstance(partition, SlicePartition)
        return read_changes(partition.slices, self._schema)

    def _check_schema(self, schema: TableSchema) -> None:
        check_shape(schema.name, change_schema(schema), self._schema)


class EnvelopeStreamReader(ChangeStreamReader):
    """Many tables: each change with its row as JSON. Shapes may differ, and change, as they like."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        settle_worker()
        if isinstance(partition, ChunkPartition):
            schema = partition.chunk.schema
            return (to_envelopes(batch, schema) for batch in read_snapshot(partition))
        assert isinstance(partition, SlicePartition)
        return read_envelopes(partition.slices)
