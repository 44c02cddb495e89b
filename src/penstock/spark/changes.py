"""Reading spooled changes of one table, in a task, as Arrow batches of one fixed schema."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import COMMIT_TIMESTAMP, COMMIT_VERSION
from penstock.errors import SchemaChangedError
from penstock.spool.reader import FileSlice

_BATCH_ROWS = 65_536


def read_changes(slice: FileSlice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a slice, in order. Spark matches columns by position on some versions, so the schema is held exactly."""
    with pq.ParquetFile(slice.path) as file:
        found = file.schema_arrow
        if found.names != schema.names or found.types != schema.types:
            raise SchemaChangedError(
                f"table {slice.file.table} changed its shape while it was being streamed",
                hint="start the query anew, with a new checkpoint, to take up the new shape",
            )
        for batch in file.iter_batches(_BATCH_ROWS):
            whole = _with_commit(batch, slice)
            kept = _within(whole, slice)
            if kept.num_rows:
                yield pa.RecordBatch.from_arrays(kept.columns, schema=schema)


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
