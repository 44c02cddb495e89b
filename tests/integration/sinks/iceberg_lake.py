"""Iceberg sinks for tests: each in a catalog of its own, all in the one Spark session."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.schema import TableName
from penstock.sinks.iceberg.definition import IcebergPlace
from penstock.sinks.iceberg.maintenance import Maintenance
from penstock.sinks.iceberg.sink import IcebergSink, ModeOf, mirrored
from tests.integration.sinks.mirror import PIPELINE

_numbers = count()


def new_catalog() -> str:
    """A session keeps the catalogs that it has loaded."""
    return f"lake_{next(_numbers)}"


def open_lake(
    spark: SparkSession,
    root: Path,
    catalog: str | None = None,
    pipeline: str = PIPELINE,
    mode_of: ModeOf = mirrored,
    **options: Any,
) -> IcebergSink:
    never = Maintenance(delete_files=0, expire_every=0)
    place = IcebergPlace(catalog or new_catalog(), root / "warehouse", **{"maintenance": never, **options})
    return IcebergSink(spark, place, pipeline, mode_of=mode_of)


def summaries(sink: IcebergSink, spark: SparkSession, table: TableName) -> list[dict[str, str]]:
    """Of the table's snapshots, oldest first, with what was done."""
    rows = spark.table(f"{sink.sql_name(table)}.snapshots").orderBy("committed_at").collect()
    return [{"operation": row["operation"], **row["summary"]} for row in rows]
