"""Executor tasks for a Parquet target: write the chunks of a snapshot, write epochs, and rewrite chunks
without the rows that changed during the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock import storage
from penstock.change import EXACT, METADATA_NAMES
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.base import ChangedRows, SnapshotFile, SnapshotPlace
from penstock.sinks.fold import fold
from penstock.sinks.keys import key_codes
from penstock.sinks.modes import Layout
from penstock.sinks.parquet.targets import MODE
from penstock.sinks.repair_files import match_column, match_text_column
from penstock.sinks.row_files import write_batches
from penstock.sinks.row_values import View, build_exact
from penstock.sinks.slice_reader import read_slices
from penstock.spool.reader import FileSlice

_NEVER = "rows of a log are never looked up"


@dataclass(frozen=True, slots=True)
class EpochTask:
    """Write changes, in their order, to a file in `directory`."""

    directory: str
    layout: Layout
    slices: tuple[FileSlice, ...]
    views: Mapping[TableSchema, View] = field(default_factory=dict)


def write_epoch(task: EpochTask) -> SnapshotFile:
    return write_batches(_changes(task), SnapshotPlace(task.directory, task.layout.schema, "changes"), 0)


def _changes(task: EpochTask) -> Iterator[pa.RecordBatch]:
    """Yield the rows to write. Each change becomes a separate row, so one spool file is read and reduced at a
    time.
    """
    for slice in task.slices:
        yield from fold(
            read_slices([slice], task.layout, views=task.views), task.layout, _look_up
        ).rows.to_batches()


def _look_up(_: pa.Table | None) -> pa.Table:
    raise AssertionError(_NEVER)


def write_snapshot(
    batches: Iterator[pa.RecordBatch], place: SnapshotPlace, index: int, fence: Position
) -> tuple[SnapshotFile, Position]:
    """A `ChunkWriter` that writes rows as changes of type `snapshot`."""
    file = write_batches((_as_changes(batch, place.schema, fence) for batch in batches), place, index)
    storage.sync_directory(Path(place.directory))
    return file, fence


def _as_changes(rows: pa.RecordBatch, schema: pa.Schema, fence: Position) -> pa.RecordBatch:
    own = len(schema) - len(METADATA_NAMES)
    values = MODE.snapshot_values(fence, datetime.now(UTC))
    added = [
        rows.column(own)
        if field.name == EXACT
        else pa.repeat(pa.scalar(values[field.name], field.type), rows.num_rows)
        for field in list(schema)[own:]
    ]
    return pa.RecordBatch.from_arrays([*rows.columns[:own], *added], schema=schema)


@dataclass(frozen=True, slots=True)
class RepairTask:
    """Rewrite the file `chunk` without the rows whose keys are in `changed`. If `chunk` is None, write the
    current rows in `changed` instead.
    """

    place: SnapshotPlace
    index: int
    chunk: str | None
    key: tuple[str, ...]
    changed: ChangedRows
    fence: Position


def repair_chunk(task: RepairTask) -> SnapshotFile:
    if task.chunk is None:
        batches = (batch for path in task.changed.rows for batch in pq.read_table(path).to_batches())
        return write_snapshot(batches, task.place, task.index, task.fence)[0]
    rows = pq.ParquetFile(Path(task.place.directory) / task.chunk).read()
    gone, mine = key_codes([_keys(task.changed, task.key, rows.schema), rows], task.key)
    kept = rows.filter(pa.array(~np.isin(mine, gone)))
    return write_batches(iter(kept.to_batches()), task.place, task.index)


def _keys(changed: ChangedRows, key: Sequence[str], schema: pa.Schema) -> pa.Table:
    found = pq.read_table(changed.keys)
    columns = [found.column(match_column(at)).cast(schema.field(name).type) for at, name in enumerate(key)]
    texts = {name: found.column(match_text_column(at)) for at, name in enumerate(key)}
    return pa.table([*columns, build_exact(texts, found.num_rows)], names=[*key, EXACT])
