"""Copy the source rows of a table under a snapshot into files that Spark reads."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock import storage
from penstock.errors import SnapshotTaskError, parse_error
from penstock.pipeline.dead_letters.snapshot_rejections import RejectedRowsFile
from penstock.pipeline.snapshots.executors import ChunkAsker
from penstock.pipeline.snapshots.task import write_file
from penstock.pipeline.transform_sink import SparkQueries
from penstock.postgres.chunks import Chunk, chunk_schema, read_chunk, snapshot_schema
from penstock.postgres.connection import SourceAddress
from penstock.sinks.base import ChunkWriter
from penstock.sinks.executors import SparkExecutors
from penstock.transforms.staging import BatchTransform
from penstock.transforms.transform import Fitted


def copy_source(
    spark: SparkSession,
    address: SourceAddress,
    snapshot: str,
    chunks: Sequence[Chunk],
    directory: Path,
    *,
    fitted: Fitted | None = None,
    rejected_directory: Path | None = None,
) -> list[str]:
    """Write the source rows of `chunks` to files, by one Spark job with a task per chunk. Returns the paths
    of the files. `fitted` transforms the rows.

    Rows that cannot be transformed go to files in `rejected_directory`, untransformed. Without
    `rejected_directory` such a row is an error.
    """
    for place in (directory, rejected_directory):
        if place is not None:
            storage.ensure_directory(place)
    if fitted is not None and fitted.query is not None:
        return _copy_through(
            spark,
            partial(read_chunk, address, snapshot),
            chunks,
            directory,
            fitted,
            rejected_directory=rejected_directory,
        )
    copier = _chunk_copier(address, snapshot, directory, fitted, rejected_directory)
    try:
        written = spark.sparkContext.parallelize(chunks, max(1, len(chunks))).map(copier).collect()
    except (PySparkException, Py4JJavaError) as error:
        unnamed = SnapshotTaskError(f"a task that read {chunks[0].schema.name} ended without an error")
        raise parse_error(str(error)) or unnamed from error
    return [path for path in written if path is not None]


def _copy_through(
    spark: SparkSession,
    read: Callable[[Chunk], Iterator[pa.RecordBatch]],
    chunks: Sequence[Chunk],
    directory: Path,
    fitted: Fitted,
    *,
    rejected_directory: Path | None,
) -> list[str]:
    """Do what `copy_source` does, for a transform with Spark expressions. Runs several jobs per chunk, and
    copies several chunks in parallel.
    """
    executors = SparkExecutors(spark, SnapshotTaskError)
    asker = ChunkAsker(fitted, write_file, SparkQueries(spark), directory / "asked")
    finish = partial(_written, snapshot_schema(fitted.schema), directory)

    def copy(chunk: Chunk) -> str | None:
        return asker.copy(executors, partial(read, chunk), finish, _rejected_file(rejected_directory))

    with ThreadPoolExecutor(
        max_workers=max(1, executors.parallelism), thread_name_prefix="penstock-verify"
    ) as pool:
        return [path for path in pool.map(copy, chunks) if path is not None]


def _chunk_copier(
    address: SourceAddress,
    snapshot: str,
    directory: Path,
    fitted: Fitted | None,
    rejected_directory: Path | None,
) -> Callable[[Chunk], str | None]:
    """Return the function that copies one chunk. Spark sends it to executors."""
    return lambda chunk: copy_chunk(
        address, snapshot, chunk, directory, fitted, rejected_directory=rejected_directory
    )


def copy_chunk(
    address: SourceAddress,
    snapshot: str,
    chunk: Chunk,
    directory: Path,
    fitted: Fitted | None = None,
    *,
    rejected_directory: Path | None = None,
) -> str | None:
    """Write one chunk to a file, and return the path of the file. Returns None if the chunk has no rows."""
    batches: Iterator[pa.RecordBatch] = read_chunk(address, snapshot, chunk)
    if fitted is None:
        return _written(chunk_schema(chunk), directory, batches)
    schema, path = snapshot_schema(fitted.schema), _rejected_file(rejected_directory)
    if path is None:
        return _written(schema, directory, BatchTransform(fitted)(batches))
    rejected_file = RejectedRowsFile(path)
    return _written(
        schema, directory, rejected_file.watch(BatchTransform(fitted, on_rejected=rejected_file)(batches))
    )


def _rejected_file(rejected_directory: Path | None) -> Path | None:
    return None if rejected_directory is None else rejected_directory / f"{secrets.token_hex(8)}.parquet"


def _written(
    schema: pa.Schema, directory: Path, batches: Iterator[pa.RecordBatch], _: ChunkWriter | None = None
) -> str | None:
    path = directory / f"{secrets.token_hex(8)}.parquet"
    rows = 0
    with (
        storage.open_new(path) as file,
        pq.ParquetWriter(
            file, schema, compression="none", use_dictionary=False, write_statistics=False
        ) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return str(path) if rows else None
