"""The source's side of a comparison: the rows of a table under a snapshot, put by executors into files that Spark reads at full speed."""

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

from penstock.errors import SnapshotTaskError, parse_error
from penstock.pipeline.letters.copy import Basket
from penstock.pipeline.snapshots.queries import ChunkAsker
from penstock.pipeline.snapshots.task import write_file
from penstock.pipeline.spark_queries import SparkQueries
from penstock.postgres.chunks import Chunk, chunk_schema, read_chunk, snapshot_schema
from penstock.postgres.connection import SourceAddress
from penstock.sinks.base import ChunkWriter
from penstock.sinks.executors import SparkExecutors
from penstock.spool import storage
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
    aside: Path | None = None,
) -> list[str]:
    """One Spark job, a task for each chunk; gives the paths of the files that were written. `fitted`: how the target sees the rows.

    Rows that cannot be made the target's go to files of the directory `aside`, as the source has them; without it they are an error.
    """
    for place in (directory, aside):
        if place is not None:
            storage.make_directory(place)
    if fitted is not None and fitted.query is not None:
        return _copy_through(spark, partial(read_chunk, address, snapshot), chunks, directory, fitted, aside=aside)
    copier = _chunk_copier(address, snapshot, directory, fitted, aside)
    try:
        written = spark.sparkContext.parallelize(chunks, max(1, len(chunks))).map(copier).collect()
    except (PySparkException, Py4JJavaError) as error:
        unnamed = SnapshotTaskError(f"a task that read {chunks[0].schema.name} ended without saying why")
        raise parse_error(str(error)) or unnamed from error
    return [path for path in written if path is not None]


def _copy_through(
    spark: SparkSession,
    read: Callable[[Chunk], Iterator[pa.RecordBatch]],
    chunks: Sequence[Chunk],
    directory: Path,
    fitted: Fitted,
    *,
    aside: Path | None,
) -> list[str]:
    """The same where Spark has to be asked about the rows: some jobs for each chunk, several chunks at once."""
    executors = SparkExecutors(spark, SnapshotTaskError)
    asker = ChunkAsker(fitted, write_file, SparkQueries(spark), directory / "asked")
    finish = partial(_written, snapshot_schema(fitted.schema), directory)

    def copy(chunk: Chunk) -> str | None:
        return asker.copy(executors, partial(read, chunk), finish, _basket(aside))

    with ThreadPoolExecutor(max_workers=max(1, executors.parallelism), thread_name_prefix="penstock-verify") as pool:
        return [path for path in pool.map(copy, chunks) if path is not None]


def _chunk_copier(
    address: SourceAddress, snapshot: str, directory: Path, fitted: Fitted | None, aside: Path | None
) -> Callable[[Chunk], str | None]:
    """The function that travels to the executors."""
    return lambda chunk: copy_chunk(address, snapshot, chunk, directory, fitted, aside=aside)


def copy_chunk(
    address: SourceAddress, snapshot: str, chunk: Chunk, directory: Path, fitted: Fitted | None = None, *, aside: Path | None = None
) -> str | None:
    """One chunk into one file, whose path is given back; None if it has no rows."""
    batches: Iterator[pa.RecordBatch] = read_chunk(address, snapshot, chunk)
    if fitted is None:
        return _written(chunk_schema(chunk), directory, batches)
    schema, path = snapshot_schema(fitted.schema), _basket(aside)
    if path is None:
        return _written(schema, directory, BatchTransform(fitted)(batches))
    basket = Basket(path)
    return _written(schema, directory, basket.watch(BatchTransform(fitted, aside=basket)(batches)))


def _basket(aside: Path | None) -> Path | None:
    return None if aside is None else aside / f"{secrets.token_hex(8)}.parquet"


def _written(schema: pa.Schema, directory: Path, batches: Iterator[pa.RecordBatch], _: ChunkWriter | None = None) -> str | None:
    path = directory / f"{secrets.token_hex(8)}.parquet"
    rows = 0
    with (
        storage.create_file(path) as file,
        pq.ParquetWriter(file, schema, compression="none", use_dictionary=False, write_statistics=False) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return str(path) if rows else None
