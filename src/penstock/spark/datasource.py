"""`format("postgres-cdc")`, and the control stream of a pipeline.

Spark builds a data source object whenever it needs one, also only to ask for the schema; all work is done in the reader.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from penstock.capture.settings import CaptureSettings
from penstock.change import change_schema
from penstock.errors import ConfigError, NoTablesError
from penstock.postgres.catalog import inspect_schema, inspect_tables
from penstock.postgres.connection import connect
from penstock.schema import TableName
from penstock.spark.reader import ChangeStreamReader, ControlStreamReader

FORMAT = "postgres-cdc"
CONTROL_FORMAT = "penstock-control"


class PostgresCdcSource(DataSource):
    """The changes of one table, typed, in order, as a stream.

    Options: `dsn`, `password`, `table` (schema.name), `slot`, `publication` (default: the slot's name), `spool` (a directory that the
    executors reach), `consumer` (default: derived from the table), `maxRowsPerBatch`, `maxBytesPerBatch`.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return from_arrow_schema(self._change_schema(), prefer_timestamp_ntz=True)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        table = self._table()
        consumer = self.options.get("consumer") or f"spark-{table}"
        options = {**self.options, "tables": str(table)}
        return ChangeStreamReader(options, table, consumer, self._change_schema())

    def _table(self) -> TableName:
        text = self.options.get("table")
        if not text:
            raise ConfigError("the option 'table' is missing", hint='add .option("table", "public.orders")')
        return TableName.parse(text)

    def _change_schema(self) -> pa.Schema:
        settings = CaptureSettings.from_options(self.options)
        wanted = self._table()
        with connect(settings.address) as connection:
            for table in inspect_tables(connection):
                if table.name == wanted:
                    return change_schema(inspect_schema(connection, table))
        raise NoTablesError(f"there is no table {wanted} in {settings.address.describe()}", hint="check the option 'table'; case counts")


class ControlSource(DataSource):
    """The clock of a pipeline; see `ControlStreamReader`."""

    @classmethod
    def name(cls) -> str:
        return CONTROL_FORMAT

    def schema(self) -> str:
        return "position STRING"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return ControlStreamReader(self.options)


def register(spark: SparkSession) -> None:
    """Make `postgres-cdc` known to this session. Needed only where Spark does not find it by itself."""
    spark.dataSource.register(PostgresCdcSource)
    spark.dataSource.register(ControlSource)
