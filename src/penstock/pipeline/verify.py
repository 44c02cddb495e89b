"""Comparing source and target, row by row.

The source is read the way a snapshot reads it, by executors under one exported snapshot, and joined with the target by key. Every column
counts, `_exact` too. The source must be at rest and the pipeline caught up: what commits meanwhile shows as a difference.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType

from penstock.change import EXACT
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.snapshot_task import ChunkTask, chunk_writer
from penstock.postgres.catalog import CatalogTable, inspect_schema, inspect_tables
from penstock.postgres.chunks import plan_chunks, snapshot_schema
from penstock.postgres.connection import connect
from penstock.postgres.exported import export_snapshot
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import SnapshotPlace
from penstock.sinks.delta import DeltaSink
from penstock.sinks.names import quoted

_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one table compares. `examples` are keys of rows that are missing, extra or different."""

    table: TableName
    source_rows: int
    target_rows: int
    missing: int
    extra: int
    different: int
    examples: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Counted apart from the join, so that a row that is there twice shows."""
        return self.source_rows == self.target_rows and not (self.missing or self.extra or self.different)


def compare_tables(spark: SparkSession, config: PipelineConfig) -> list[Comparison]:
    """Compare every table that the pipeline mirrors, in name order."""
    address = config.source.address()
    sink = DeltaSink(spark, config.sink.delta.path, config.pipeline)
    scratch = config.state / "verify"
    found = []
    try:
        with export_snapshot(address) as exported:
            with connect(address) as connection:
                tables = [table for table in inspect_tables(connection) if config.selects(table.name)]
            for number, table in enumerate(tables):
                if sink.load_target(table.name) is None:
                    continue
                with connect(address) as connection:
                    schema = inspect_schema(connection, table, config.types.policy, config.publication)
                    tasks = _tasks(connection, table, schema, scratch / str(number), config)
                spark.sparkContext.parallelize(tasks, max(1, len(tasks))).map(chunk_writer(address, exported.name)).collect()
                found.append(_compare(spark, schema, scratch / str(number), sink.path(table.name)))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return found


def _tasks(connection: object, table: CatalogTable, schema: TableSchema, directory: Path, config: PipelineConfig) -> list[ChunkTask]:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    place = SnapshotPlace(str(directory), snapshot_schema(schema), "source")
    chunks = plan_chunks(connection, table, schema, config.snapshot_chunk_bytes, config.publication)  # type: ignore[arg-type]
    return [ChunkTask(index, chunk, place) for index, chunk in enumerate(chunks)]


def _compare(spark: SparkSession, schema: TableSchema, source: Path, target: Path) -> Comparison:
    columns = [*schema.column_names, EXACT]
    right = spark.read.format("delta").load(str(target)).select(*[quoted(name) for name in columns])
    files = [str(path) for path in source.glob("*.parquet")]
    left = spark.read.schema(right.schema).parquet(*files) if files else right.limit(0)
    joined = _side(left, schema, "l").join(_side(right, schema, "r"), F.col("lk").eqNullSafe(F.col("rk")), "full_outer")
    verdict = (
        F.when(F.col("r").isNull(), "missing").when(F.col("l").isNull(), "extra").when(~F.col("l").eqNullSafe(F.col("r")), "different")
    )
    judged = joined.select(verdict.alias("verdict"), F.coalesce("lk", "rk").alias("key")).where("verdict IS NOT NULL").cache()
    try:
        counts = {row["verdict"]: row["count"] for row in judged.groupBy("verdict").count().collect()}
        examples = judged.limit(_EXAMPLES).collect()
    finally:
        judged.unpersist()
    missing, extra, different = (counts.get(name, 0) for name in ("missing", "extra", "different"))
    texts = tuple(f"{row['verdict']} {row['key'].asDict()}" for row in examples)
    return Comparison(schema.name, left.count(), right.count(), missing, extra, different, texts)


def _side(frame: DataFrame, schema: TableSchema, name: str) -> DataFrame:
    """A row as two structs: its key, and everything in it; a map is compared as its sorted entries."""
    types = {field.name: field.dataType for field in frame.schema}
    whole = [_comparable(F.col(quoted(column)), types[column]).alias(column) for column in (*schema.column_names, EXACT)]
    key = [F.col(quoted(column)) for column in schema.key] + [F.col(EXACT)[column].alias(f"{column} exactly") for column in schema.key]
    return frame.select(F.struct(*key).alias(f"{name}k"), F.struct(*whole).alias(name))


def _comparable(column: Column, data_type: DataType) -> Column:
    """Spark compares everything but maps, however deep they are."""
    if isinstance(data_type, MapType):
        return F.array_sort(F.map_entries(column))
    if isinstance(data_type, ArrayType) and _holds_map(data_type):
        element = data_type.elementType
        return F.transform(column, lambda each: _comparable(each, element))
    return column


def _holds_map(data_type: DataType) -> bool:
    return isinstance(data_type, MapType) or (isinstance(data_type, ArrayType) and _holds_map(data_type.elementType))
