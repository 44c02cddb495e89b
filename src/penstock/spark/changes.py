"""Reading spooled changes of one table, in a task, as Arrow batches of one fixed schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from penstock.errors import SchemaChangedError
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
    for each in slices:
        yield from _read_slice(each, schema)


def _read_slice(slice: FileSlice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    # A batch stands in memory as a whole, here and in the JVM.
    for batch in read_rows(slice, _BATCH_ROWS, _BATCH_BYTES):
        if batch.schema.names != schema.names or batch.schema.types != schema.types:
            raise SchemaChangedError(
                f"table {slice.file.table} changed its shape while it was being streamed",
                hint="start the query anew, with a new checkpoint, to take up the new shape",
            )
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
