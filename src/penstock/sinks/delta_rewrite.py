"""Files of a Delta table written anew by executors, with the types that its columns have now, and what was given to those that are new."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.delta_rows import ScanFile, TableFiles, read_groups
from penstock.sinks.layout import CURRENT, DELETED
from penstock.sinks.roaring import Positions
from penstock.sinks.row_files import write_batches


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """Travels to an executor."""

    table: TableFiles
    file: ScanFile
    gone: Positions | None
    """Rows that go, besides those that are gone already."""
    fills: Mapping[str, pa.Scalar]
    place: SnapshotPlace
    index: int


def run_rewrite(task: RewriteTask) -> SnapshotFile:
    """What an executor does. A file of which nothing is left is none."""
    return write_batches(_batches(task), task.place, task.index)


def _batches(task: RewriteTask) -> Iterator[pa.RecordBatch]:
    for rows in read_groups(task.table, task.file, task.gone):
        filled = {name: _filled(rows, fill) for name, fill in task.fills.items()}
        columns = [filled.get(name, column) for name, column in zip(rows.column_names, rows.columns, strict=True)]
        yield from pa.table(columns, schema=rows.schema).to_batches()


def _filled(rows: pa.Table, fill: pa.Scalar) -> pa.ChunkedArray | pa.Array:
    """Only what is there in the source was given something: no row that was deleted, or was of an earlier time."""
    column = pa.repeat(fill, rows.num_rows)
    nothing = pa.scalar(None, fill.type)
    if CURRENT in rows.column_names:
        return pc.if_else(rows.column(CURRENT), column, nothing)
    if DELETED in rows.column_names:
        return pc.if_else(rows.column(DELETED), nothing, column)
    return column
