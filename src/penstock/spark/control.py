"""The control stream of a pipeline, as Spark sees it. Whoever only has to know what it is called and has need not load how it is read."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader

CONTROL_FORMAT = "penstock-control"


class ControlSource(DataSource):
    """The clock of a pipeline; see `ControlStreamReader`."""

    @classmethod
    def name(cls) -> str:
        return CONTROL_FORMAT

    def schema(self) -> str:
        return "position STRING"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        from penstock.spark.reader import ControlStreamReader

        return ControlStreamReader(self.options)
