"""The source's side of a comparison: the rows of a table under a snapshot, put by executors into files that Spark reads at full speed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.errors import SnapshotTaskError, parse_error
from penstock.postgres.chunks import Chunk, chunk_schema, read_chunk, snapshot_schema
from penstock.postgres.connection import SourceAddress
from penstock.transforms.staging import BatchTransform
from penstock.transforms.transform import Fitted


def copy_source(
    spark: SparkSession, address: SourceAddress, snapshot: str, chunks: Sequence[Chunk], directory: Path, *, fitted: Fitted | None = None
) -> list[str]:
    """One Spark job, a task for each chunk; gives the paths of the files that were written. `fitted`: how the target sees the rows."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        written = (
            spark.sparkContext.parallelize(chunks, max(1, len(chunks))).map(_chunk_copier(address, snapshot, directory, fitted)).collect()
        )
    except (PySparkException, Py4JJavaError) as error:
        unnamed = SnapshotTaskError(f"a task that read {chunks[0].schema.name} ended without saying why")
        raise parse_error(str(error)) or unnamed from error
    return [path for path in written if path is not None]


def _chunk_copier(address: SourceAddress, snapshot: str, directory: Path, fitted: Fitted | None) -> Callable[[Chunk], str | None]:
    """The function that travels to the executors."""
    return lambda chunk: copy_chunk(address, snapshot, chunk, directory, fitted)


def copy_chunk(address: SourceAddress, snapshot: str, chunk: Chunk, directory: Path, fitted: Fitted | None = None) -> str | None:
    """One chunk into one file, whose path is given back; None if it has no rows."""
    path = directory / f"{secrets.token_hex(8)}.parquet"
    rows = 0
    schema = chunk_schema(chunk) if fitted is None else snapshot_schema(fitted.schema)
    batches: Iterator[pa.RecordBatch] = read_chunk(address, snapshot, chunk)
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False, write_statistics=False) as writer:
        for batch in batches if fitted is None else BatchTransform(fitted)(batches):
            writer.write_batch(batch)
            rows += batch.num_rows
    return str(path) if rows else None
