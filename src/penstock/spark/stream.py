"""The stream readers of `postgres-cdc`: the changes of one table as typed rows, or of many tables as
envelopes; optionally after a snapshot.

`startingPosition` defines the start of a new query. The end offset of the first batch stores it, because
Spark may repeat that batch in another process. A snapshot is read in batches of heap blocks, under an
exported snapshot that this process holds; the changes after its fence come from the spool. Publication, slot
and fence are created in this order, so the slot has all commits after the fence. The slot keeps these commits
until Spark has committed the batches that contain them, since this consumer releases only the fence during
the snapshot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.capture.factory import missing_capture
from penstock.capture.settings import CaptureSettings
from penstock.change import change_schema
from penstock.errors import SpoolGapError
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.spark import options as declared
from penstock.spark.envelope import check_shape, plan_tasks, read_changes, read_envelopes, to_envelopes
from penstock.spark.options import Admission, ReadAllAvailable
from penstock.spark.reader import SpoolStreamReader, position_of
from penstock.spark.request import SourceRequest
from penstock.spark.snapshot import ChunkPartition, StreamSnapshot, read_snapshot
from penstock.spark.start import (
    GIVEN,
    NEW_QUERY,
    ChangeOffset,
    TableWatch,
    begin_now,
    check_owner,
    choose_tables,
    ensure_source,
    hold_from,
    with_query_hints,
)
from penstock.spool.ownership import ConsumerLock
from penstock.spool.reader import FileSlice, SpoolReader
from penstock.spool.retention import release, set_released
from penstock.spool.rows import check_values
from penstock.worker import settle_worker

_log = logging.getLogger(__name__)

_ENDING_SECONDS = 30.0
"""Time to wait until an earlier run of the query has ended, since the last confirmation of that run is
needed.
"""
_PATIENCE_SECONDS = 60.0


@dataclass
class SlicePartition(InputPartition):
    """Changes in files, or in parts of files, in order; read by one task."""

    slices: tuple[FileSlice, ...]


class ChangeStreamReader(SpoolStreamReader):
    """The changes of the selected tables. Offsets that Spark has committed are released to the capture.
    Subclasses define the form of a row.
    """

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

    # Spark's API
    # --------------------------------------------------------------------------------------------------------

    def latestOffset(self, start: Mapping[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        with with_query_hints(self._request.capture()):
            return self._next(start, limit)

    def _next(self, start: Mapping[str, Any] | None, limit: Any) -> dict[str, Any]:
        reached = ChangeOffset.parse(start) if start is not None else self._last
        if reached == ChangeOffset.INITIAL:
            self._begun = self._begun or self._begin(limit)
            if self._begun != reached:
                return self._begun.to_document()
        self._check_ownership(self._request.capture())
        self._tables.check()
        if reached.chunk is not None:
            return self._admitted(reached, limit).to_document()
        if self._snapshot is not None:  # the last batch of the snapshot is finished
            self._snapshot.close()
        self._note_given(reached)
        self._settle_goal(reached.position)
        position = position_of(super().latestOffset(start, limit))
        if position == reached.position:
            return reached.to_document()
        return ChangeOffset(
            position, begins=declared.SLOT if reached == ChangeOffset.INITIAL else None
        ).to_document()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        first, last = ChangeOffset.parse(start), ChangeOffset.parse(end)
        self._last, self._planned = last, last.position
        self._note_given(first)
        self._note_given(last)
        if first == last:
            return []
        with with_query_hints(self._request.capture()):
            return self._parts(start, end, first, last)

    def _parts(
        self, start: Mapping[str, Any], end: Mapping[str, Any], first: ChangeOffset, last: ChangeOffset
    ) -> Sequence[InputPartition]:
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

    # --- start of the query ---------------------------------------------------------------------------------

    def _begin(self, limit: Any) -> ChangeOffset:
        """The end offset of the first batch: the start position of the query, or the end of the first
        snapshot steps.
        """
        request, settings = self._request, self._request.capture()
        self._check_ownership(settings)
        if settings.is_separate and (missing := missing_capture(settings.spool)) is not None:
            raise missing
        start = request.start
        if isinstance(start, Position):
            hold_from(settings, request.consumer, start)
        ensure_source(request)
        self._tables.begin(replace=start != declared.SLOT)
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
        self._check_ownership(settings)
        release(settings.spool, request.consumer, plan.fence)
        first = self._admitted(ChangeOffset(plan.fence, 0), limit)
        return first if first.chunk is not None else replace(first, begins=declared.SNAPSHOT)

    def _begins(self, last: ChangeOffset) -> str | Position:
        """The kind of start of the query whose first batch ends at `last`."""
        if last.chunk is not None:
            return declared.SNAPSHOT
        return last.begins or self._request.start

    def _note_given(self, offset: ChangeOffset) -> None:
        if offset.begins == GIVEN:
            self._given = offset.position

    def _admitted(self, reached: ChangeOffset, limit: Any) -> ChangeOffset:
        """The end offset of the next batch of snapshot steps."""
        assert reached.chunk is not None
        capture, _ = self._running(reached.position)
        capture.wait_until(Position.ZERO, 0.0)  # raises the capture's error, if it has ended
        plan = self._snapshots.plan(reached.position)
        admission = (
            Admission(None, None) if isinstance(limit, ReadAllAvailable) else self._request.snapshot_admission
        )
        upto = plan.admit(reached.chunk, admission.rows, admission.bytes)
        return ChangeOffset(reached.position, None if upto == len(plan.steps) else upto)

    def _steps(self, first: ChangeOffset, last: ChangeOffset) -> Sequence[InputPartition]:
        """The partitions of a batch of snapshot steps; none if the batch only sets the start position."""
        fence = last.position
        is_mere_place = first.chunk is None and self._begins(last) != declared.SNAPSHOT
        if is_mere_place and (last.begins is not None or not self._snapshots.knows(fence)):
            return []
        return self._snapshots.partitions(fence, first.chunk or 0, last.chunk)

    @property
    def _snapshots(self) -> StreamSnapshot:
        if self._snapshot is None:
            request = self._request
            self._snapshot = StreamSnapshot(
                request, lambda connection: choose_tables(connection, request), self._check_schema
            )
        return self._snapshot

    def _check_ownership(self, settings: CaptureSettings) -> None:
        """Check the owner of the spool and the consumer name, before anything in the spool is read or
        released. The check is repeated until the spool has an owner: another query that started at the same
        time may become the owner.
        """
        self._is_owner_known = self._is_owner_known or check_owner(settings)
        self._lock = self._lock or ConsumerLock(settings.spool, self._request.consumer)
        self._lock.wait(_ENDING_SECONDS)

    def _settle_goal(self, reached: Position) -> None:
        """If the query has an end, move it to at least the position at which all rows of the snapshot are
        consistent.
        """
        if self._goal is not None:
            settled = self._snapshots.settled(reached)
            self._goal = max(self._goal, settled) if settled > reached else self._goal

    def _check_schema(self, schema: TableSchema) -> None:
        """Raise if tables with this schema are not supported by the stream."""

    # --- SpoolStreamReader ----------------------------------------------------------------------------------

    def _waiting(self) -> None:
        """Log a warning if the query needs a separate capture and it is not running. If the query has an end,
        raise an error after a minute.
        """
        settings = self._request.capture()
        missing = missing_capture(settings.spool) if settings.is_separate else None
        if missing is None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
            _log.warning(
                "capture is not running",
                extra={"code": missing.code, "reason": missing.message, "fix": missing.hint},
            )
        elif self._goal is not None and time.monotonic() - self._missing_since > _PATIENCE_SECONDS:
            raise missing

    def _prepare(self, settings: CaptureSettings, finished: Position) -> None:
        self._check_ownership(settings)
        self._tables.check()
        # Set the release before the capture starts, so that the capture detects a slot that is past this
        # query's position. If the checkpoint was restored from a backup, the query needs earlier changes
        # again.
        consumer, safe = self._request.consumer, self._safe(finished)
        if Position.ZERO < safe < release(settings.spool, consumer, Position.ZERO):
            set_released(settings.spool, consumer, safe)
        self._acknowledge(finished)

    def _acknowledge(self, position: Position) -> None:
        release(self._request.capture().spool, self._request.consumer, self._safe(position))

    def _safe(self, position: Position) -> Position:
        """The position to release for `position`: zero for a start position that a user gave. It may be
        inside a commit record, and confirming it would lose that commit.
        """
        return Position.ZERO if position == self._given else position

    def _first(self, spool: SpoolReader, reached: Position) -> Position:
        """The position to read from. A query that starts with the slot reads from the beginning of the spool,
        or from the position that an earlier query of the same consumer released.
        """
        begin = super()._first(spool, reached)
        return (
            begin
            if reached > Position.ZERO
            else max(begin, release(spool.root, self._request.consumer, Position.ZERO))
        )

    def _plan(self, spool: SpoolReader, start: Position, end: Position) -> Sequence[InputPartition]:
        if start >= end:
            raise SpoolGapError(
                f"the batch up to {end} cannot be repeated: the spool has its changes only after {start}",
                hint=NEW_QUERY,
            )
        found: list[InputPartition] = []
        capture = self._request.capture()
        for table, changes in spool.read(start, end).tables.items():
            if self._request.choice.selects(table):
                slices = changes.with_old if capture.old_rows else changes.slices
                check_values(table, slices, reject_inexact=capture.types.rejects_inexact)
                found += [SlicePartition(task) for task in plan_tasks(slices)]
        return found


class TableStreamReader(ChangeStreamReader):
    """Changes of one table, with its typed columns and the metadata of each change."""

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
    """Changes of many tables as envelopes, with each row as JSON. Schemas may differ between tables, and may
    change.
    """

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        settle_worker()
        if isinstance(partition, ChunkPartition):
            schema = partition.chunk.schema
            return (to_envelopes(batch, schema) for batch in read_snapshot(partition))
        assert isinstance(partition, SlicePartition)
        return read_envelopes(partition.slices)
