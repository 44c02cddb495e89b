"""Reading spooled changes of one table, in a task, as Arrow batches of one fixed schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import COMMIT_TIMESTAMP, COMMIT_VERSION
from penstock.errors import SchemaChangedError
from penstock.spool.reader import FileSlice

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
    with pq.ParquetFile(slice.path) as file:
        found = file.schema_arrow
        if found.names != schema.names or found.types != schema.types:
            raise SchemaChangedError(
                f"table {slice.file.table} changed its shape while it was being streamed",
                hint="start the query anew, with a new checkpoint, to take up the new shape",
            )
        for batch in file.iter_batches(_batch_rows(slice)):
            kept = _within(_with_commit(batch, slice), slice)
            if kept.num_rows:
                yield pa.RecordBatch.from_arrays(kept.columns, schema=schema)


def _batch_rows(slice: FileSlice) -> int:
    """As many rows as are worth a batch, but fewer of long ones: a batch stands in memory as a whole, here and in the JVM."""
    row_bytes = max(1, slice.file.bytes // max(1, slice.file.rows))
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))


def _with_commit(batch: pa.RecordBatch, slice: FileSlice) -> pa.RecordBatch:
    """Rows of a transaction that was open when they were written learn its commit from the manifest."""
    if slice.file.commit_version is None:
        return batch
    version = pa.repeat(pa.scalar(slice.file.commit_version.value, pa.int64()), batch.num_rows)
    time = pa.repeat(pa.scalar(slice.file.commit_timestamp, pa.timestamp("us", "UTC")), batch.num_rows)
    names = batch.schema.names
    batch = batch.set_column(names.index(COMMIT_VERSION), batch.schema.field(COMMIT_VERSION), version)
    return batch.set_column(names.index(COMMIT_TIMESTAMP), batch.schema.field(COMMIT_TIMESTAMP), time)


def _within(batch: pa.RecordBatch, slice: FileSlice) -> pa.RecordBatch:
    column = batch.column(COMMIT_VERSION)
    if slice.after is not None:
        batch = batch.filter(pc.greater(column, slice.after.value))
        column = batch.column(COMMIT_VERSION)
    if slice.upto is not None:
        batch = batch.filter(pc.less_equal(column, slice.upto.value))
    return batch
