"""Reading spooled changes, in a task, as Arrow batches of one fixed schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from penstock.errors import EnvironmentUnfitError, SchemaChangedError
from penstock.schema import TableName
from penstock.spark.envelope import to_envelopes
from penstock.spool.reader import FileSlice
from penstock.spool.rows import read_rows

_BATCH_ROWS = 65_536
_BATCH_BYTES = 32 << 20
_TASK_ROWS = 100_000


def plan_tasks(slices: Iterable[FileSlice]) -> list[tuple[FileSlice, ...]]:
    """Share slices out to tasks, in order. A task costs more than reading a small file, and a quiet table has many small files."""
    tasks: list[list[FileSlice]] = []
    rows = _TASK_ROWS
    for each in slices:
        if rows + each.file.rows > _TASK_ROWS:
            tasks.append([])
            rows = 0
        tasks[-1].append(each)
        rows += each.file.rows
    return [tuple(task) for task in tasks]


def read_changes(slices: Sequence[FileSlice], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of some slices, in order. Spark 4.1 matches columns by their place alone, so the schema is held exactly."""
    for each, batch in _read(slices):
        check_shape(each.file.table, batch.schema, schema)
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def read_envelopes(slices: Sequence[FileSlice]) -> Iterator[pa.RecordBatch]:
    """The same as envelopes, whatever shape the tables have."""
    for each, batch in _read(slices):
        yield to_envelopes(batch, each.file.schema)


def check_shape(table: TableName, found: pa.Schema, schema: pa.Schema) -> None:
    if found.names != schema.names or found.types != schema.types:
        raise SchemaChangedError(
            f"table {table} changed its shape while it was being streamed",
            hint="start the query anew, with a new checkpoint, to take up the new shape",
        )


def _read(slices: Sequence[FileSlice]) -> Iterator[tuple[FileSlice, pa.RecordBatch]]:
    for each in slices:
        _check_reachable(each)
        # A batch stands in memory as a whole, here and in the JVM.
        for batch in read_rows(each, _BATCH_ROWS, _BATCH_BYTES):
            yield each, batch


def _check_reachable(slice: FileSlice) -> None:
    root = slice.path.parents[2]
    if not root.exists():
        raise EnvironmentUnfitError(
            f"the spool at {root} cannot be reached from this executor",
            hint='put it where the driver and every executor see it: .option("spool", "/a/shared/directory")',
        )
