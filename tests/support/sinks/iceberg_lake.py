"""Iceberg sinks for tests: each has its own catalog, all share one Spark session."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.schema import TableName
from penstock.sinks.iceberg.definition import IcebergPlace
from penstock.sinks.iceberg.maintenance import Maintenance
from penstock.sinks.iceberg.sink import IcebergSink
from penstock.sinks.modes import ModeOf, mirrored
from tests.support.sinks.items import ITEMS, item
from tests.support.sinks.mirror import PIPELINE, Mirror
from tests.support.sinks.source import Source, Value

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
    """Summaries and operations of the table's snapshots, oldest first."""
    rows = spark.table(f"{sink.sql_name(table)}.snapshots").orderBy("committed_at").collect()
    return [{"operation": row["operation"], **row["summary"]} for row in rows]


NAME = ITEMS.name


class Lake:
    """Nine items in an Iceberg table."""

    def __init__(
        self, spark: SparkSession, root: Path, maintenance: Maintenance | None = None, format_version: int = 2
    ) -> None:
        self.spark = spark
        self.root = root
        self.catalog = new_catalog()
        chosen = maintenance or Maintenance(0, 3600, 0)
        self.sink = open_lake(spark, root, self.catalog, maintenance=chosen, format_version=format_version)
        source = Source(ITEMS, [item(key, f"note {key}", Value(None, f"{key}e90")) for key in range(1, 10)])
        self.mirror = Mirror(spark, root, source, self.sink)

    @property
    def source(self) -> Source:
        return self.mirror.source

    @property
    def summaries(self) -> list[dict[str, str]]:
        return summaries(self.sink, self.spark, NAME)

    @property
    def data_files(self) -> list[str]:
        return [row["file_path"] for row in self.spark.table(f"{self.sink.sql_name(NAME)}.files").collect()]

    def again(self, pipeline: str = PIPELINE) -> IcebergSink:
        """A sink without cached state of the other."""
        return open_lake(self.spark, self.root, self.catalog, pipeline)
