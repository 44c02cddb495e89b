"""Comparing source and target, table by table.

The source is read the way a snapshot reads it, by executors under one exported snapshot, and compared with the target row by row. Every
column counts, `_exact` too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.change import EXACT
from penstock.pipeline.comparing import Comparison, TableComparer
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.source_copy import copy_source
from penstock.postgres.catalog import CatalogTable, inspect_schema, inspect_tables
from penstock.postgres.chunks import plan_chunks
from penstock.postgres.connection import connect
from penstock.postgres.exported import ExportedSnapshot, export_snapshot
from penstock.sinks.delta import DeltaSink
from penstock.sinks.names import quoted


def compare_tables(spark: SparkSession, config: PipelineConfig) -> list[Comparison]:
    """Compare every table that has a target, as both sides are now, in name order. For a source at rest and a pipeline that has ended."""
    address = config.source.address()
    sink = DeltaSink(spark, config.sink.delta.path, config.pipeline)
    with export_snapshot(address) as exported:
        with connect(address) as connection:
            tables = [table for table in inspect_tables(connection) if config.selects(table.name)]
        filled = [table for table in tables if sink.load_target(table.name) is not None]
        return [compare_table(spark, config, table, exported, sink.path(table.name), None) for table in filled]


def compare_table(
    spark: SparkSession, config: PipelineConfig, table: CatalogTable, exported: ExportedSnapshot, target: Path, version: int | None
) -> Comparison:
    """One table under the snapshot, with a version of its target, by default the newest."""
    address = config.source.address()
    with connect(address) as connection:
        schema = inspect_schema(connection, table, config.types.policy, config.publication)
        chunks = plan_chunks(connection, table, schema, config.snapshot_chunk_bytes, config.publication)
    scratch = config.state / "verify" / f"{exported.fence.value:016X}-{table.oid}"
    try:
        files = copy_source(spark, address, exported.name, chunks, scratch)
        reader = spark.read.format("delta")
        reader = reader if version is None else reader.option("versionAsOf", version)
        right = reader.load(str(target)).select(*[quoted(name) for name in (*schema.column_names, EXACT)])
        left = spark.read.schema(right.schema).parquet(*files) if files else right.limit(0)
        return TableComparer(schema, {field.name: field.dataType for field in right.schema}).compare(left, right)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
