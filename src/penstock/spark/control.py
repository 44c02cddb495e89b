"""Spark data source of a pipeline's control stream. The reader is imported lazily, since most importers need
only `CONTROL_FORMAT`.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader

CONTROL_FORMAT = "penstock-control"


class ControlSource(DataSource):
    """Data source that triggers epochs; see `ControlStreamReader`."""

    @classmethod
    def name(cls) -> str:
        return CONTROL_FORMAT

    def schema(self) -> str:
        return "position STRING"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        from penstock.spark.reader import ControlStreamReader

        return ControlStreamReader(self.options)
