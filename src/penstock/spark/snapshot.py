"""The snapshot of a streaming query, in the process of the reader: export and hold the snapshot, and assign
its chunks to tasks.

Publication and slot must exist before the snapshot is exported. The exported snapshot lives as long as its
connection in this process; tasks import it by name. `SnapshotPlan` describes how the copy continues after the
exported snapshot was lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.change import snapshot_batch
from penstock.errors import ConfigError, SnapshotLostError, SpoolGapError, TableWithoutKeyError
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunked_table import chunk_tables
from penstock.postgres.chunks import Chunk, read_chunk
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.consistent_read import inspect_filenodes, inspect_horizon, written_since
from penstock.postgres.snapshot_export import ExportedSnapshot, export_snapshot
from penstock.schema import TableSchema
from penstock.spark.request import SourceRequest
from penstock.spark.snapshot_plan import Heap, SnapshotPlan, Step, load_plan, store_plan
from penstock.spark.start import NEW_QUERY

_log = logging.getLogger(__name__)

_ORDINALS_PER_STEP = 1 << 40
"""Ordinals reserved for the rows of one step: far more than the rows of a heap of 2³² blocks."""
_MOST_STEPS = 1 << 23
"""With more steps, ordinals would exceed 64 bits."""
_MOST_FIRST_STEPS = _MOST_STEPS >> 3
"""Limit for a new plan. A plan becomes longer whenever its snapshot is lost."""

FindTables = Callable[[Connection], list[CatalogTable]]
CheckSchema = Callable[[TableSchema], None]


@dataclass
class ChunkPartition(InputPartition):
    """One step of a snapshot, read by one task on any machine that can connect to the source."""

    address: SourceAddress
    snapshot: str | None
    """Name of the exported snapshot; None if a single task reads everything and takes its own snapshot."""
    chunk: Chunk
    fence: int | None
    """Position of the rows; None in a batch read, whose rows have no position."""
    number: int
    reject_inexact: bool


class StreamSnapshot:
    """One consumer's snapshot. Used only by the thread in which Spark calls the reader."""

    def __init__(self, request: SourceRequest, find_tables: FindTables, check_schema: CheckSchema) -> None:
        self._request = request
        self._settings = request.capture()
        self._find_tables = find_tables
        self._check_schema = check_schema
        self._stack = ExitStack()
        self._held: ExportedSnapshot | None = None
        self._held_since = 0.0
        self._plan: SnapshotPlan | None = None
        self._chunks: dict[int, Chunk] = {}
        """One chunk of each heap, by OID, from which the chunks of the heap's steps are derived."""

    def begin(self) -> SnapshotPlan:
        """Take a new snapshot and make a new plan, regardless of earlier ones."""
        exported = self._export()
        heaps = self._inspect_heaps()
        is_keyless = {oid: not self._chunks[oid].schema.key for oid in heaps}
        steps = [step for oid in sorted(heaps, key=lambda oid: not is_keyless[oid]) for step in heaps[oid]]
        if len(steps) > _MOST_FIRST_STEPS:
            raise _too_many(len(steps), _MOST_FIRST_STEPS)
        keyless = sum(len(heaps[oid]) for oid in heaps if is_keyless[oid])
        with connect(self._settings.address) as connection:
            horizon = inspect_horizon(connection, exported.name)
        return self._keep(SnapshotPlan(exported.fence, horizon, tuple(steps), keyless=keyless))

    def plan(self, fence: Position) -> SnapshotPlan:
        """The plan of the snapshot at `fence`, made by this process or an earlier one. Raises if the spool
        has no such plan.
        """
        found = self._known()
        if found is None or found.fence != fence:
            raise SpoolGapError(
                f"the plan of the snapshot at {fence} is not in the spool at {self._settings.spool}, so it "
                "cannot be finished",
                hint=NEW_QUERY,
            )
        return found

    def settled(self, reached: Position) -> Position:
        """The first position at or after `reached` at which all rows are consistent: rows read under a later
        snapshot are newer than the fence.
        """
        found = self._known()
        if found is None or found.last is None or reached < found.fence:
            return reached
        return max(reached, found.last)

    def knows(self, fence: Position) -> bool:
        """Whether a plan of a snapshot at `fence` exists."""
        found = self._known()
        return found is not None and found.fence == fence

    def partitions(self, fence: Position, done: int, upto: int | None) -> list[ChunkPartition]:
        """The partitions of the steps from index `done` to `upto` (exclusive; None: to the end). Spark has
        committed all earlier steps.
        """
        plan = self.plan(fence)
        if not self._is_fit(plan, done, upto):
            plan = self._replan(plan, done, upto)
        assert self._held is not None
        found = []
        for number in range(done, len(plan.steps) if upto is None else upto):
            step = plan.steps[number]
            if step is not None:
                found.append(self._partition(plan, step, number, self._held.name))
        return found

    def close(self) -> None:
        """Release the snapshot and its connection. Called after Spark has committed the last step, when the
        reader stops, and before a new snapshot is exported.
        """
        self._held = None
        self._stack.close()

    def _partition(self, plan: SnapshotPlan, step: Step, number: int, snapshot: str) -> ChunkPartition:
        template = self._chunks[step.heap.oid]
        conditions = [written_since(plan.horizon)] if step.is_second else []
        chunk = replace(
            template, first=step.first, last=step.last, heap_bytes=step.heap_bytes
        ).with_conditions(conditions)
        reject_inexact = self._settings.types.rejects_inexact
        return ChunkPartition(
            self._settings.address, snapshot, chunk, plan.fence.value, number, reject_inexact
        )

    def _is_fit(self, plan: SnapshotPlan, done: int, upto: int | None) -> bool:
        """Whether the next batch can be read under the snapshot that is open now."""
        if self._held is None:
            return False
        is_old = time.monotonic() - self._held_since > self._request.hold_seconds
        left = {step.heap.oid for step in plan.steps[done:] if step is not None}
        if is_old and done > 0 and all(self._chunks[oid].schema.key for oid in left):
            return False
        wanted = {step.heap for step in plan.steps[done:upto] if step is not None}
        try:
            with connect(self._settings.address) as connection:
                inspect_horizon(connection, self._held.name)
                filenodes = inspect_filenodes(connection, [heap.oid for heap in wanted])
        except SnapshotLostError:
            return False
        return all(filenodes.get(heap.oid) == heap.filenode for heap in wanted)

    def _replan(self, plan: SnapshotPlan, done: int, upto: int | None) -> SnapshotPlan:
        exported = self._export()
        steps = self._inspect_heaps()
        _log.warning(
            "snapshot planned again",
            extra={
                "fence": str(plan.fence),
                "now": str(exported.fence),
                "steps_done": done,
                "steps": len(plan.steps),
            },
        )
        keyless = {oid for oid, chunk in self._chunks.items() if not chunk.schema.key}
        for step in plan.steps[done:]:
            if step is not None and step.heap.oid in keyless:
                raise TableWithoutKeyError(
                    f"the snapshot of table {step.heap.table} was interrupted, and the table has no key by "
                    "which duplicate rows "
                    "could be recognized",
                    hint=f"{NEW_QUERY}, with maxBytesPerBatch at {plan.keyless_bytes * 2} and without "
                    "maxRowsPerBatch, so that all tables "
                    "without a key are read in one batch",
                )
        replanned = plan.replan(done, steps, keyless, upto=upto, now=exported.fence)
        if len(replanned.steps) > _MOST_STEPS:
            raise _too_many(len(replanned.steps), _MOST_STEPS)
        return self._keep(replanned)

    def _known(self) -> SnapshotPlan | None:
        """The last plan of this consumer, which an earlier query may have stored; None if there is none."""
        if self._plan is None:
            self._plan = load_plan(self._settings.spool, self._request.consumer)
        return self._plan

    def _keep(self, plan: SnapshotPlan) -> SnapshotPlan:
        store_plan(self._settings.spool, self._request.consumer, plan)
        self._plan = plan
        return plan

    def _export(self) -> ExportedSnapshot:
        self.close()
        self._held = self._stack.enter_context(export_snapshot(self._settings.address))
        self._held_since = time.monotonic()
        return self._held

    def _inspect_heaps(self) -> dict[int, list[Step]]:
        """The steps that read each heap as it is now, by OID of the heap."""
        steps: dict[int, list[Step]] = {}
        with connect(self._settings.address) as connection:
            planned = chunk_tables(
                connection,
                self._find_tables(connection),
                self._settings.types,
                self._settings.publication,
                self._request.chunk_bytes,
            )
        for table in planned:
            self._check_schema(table.schema)
            for chunk in table.chunks:
                heap = Heap(table.schema.name, chunk.heap_oid, chunk.filenode)
                steps.setdefault(heap.oid, []).append(Step(heap, chunk.first, chunk.last, chunk.heap_bytes))
                self._chunks[heap.oid] = chunk
        return steps


def _too_many(steps: int, most: int) -> ConfigError:
    return ConfigError(
        f"the snapshot has {steps} steps, more than the limit of {most}",
        hint=f"{NEW_QUERY}, with a larger chunkBytes, and a larger maxRowsPerBatch if it is set",
    )


def read_snapshot(partition: ChunkPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one step as changes of type `snapshot` at the fence."""
    ordinal = partition.number * _ORDINALS_PER_STEP
    chunk, snapshot = partition.chunk, partition.snapshot
    for batch in read_chunk(partition.address, snapshot, chunk, reject_inexact=partition.reject_inexact):
        yield snapshot_batch(batch, chunk.schema, partition.fence, ordinal)
        ordinal += batch.num_rows
