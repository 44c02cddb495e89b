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

from penstock.capture.settings import CaptureSettings, tables_option
from penstock.change import METADATA_NAMES, change_schema
from penstock.errors import ConfigError, NoTablesError, SchemaChangedError, UnsupportedTableError
from penstock.postgres.catalog import inspect_schema, inspect_tables
from penstock.postgres.connection import connect
from penstock.schema import TableName, TableSchema
from penstock.spark.reader import ChangeStreamReader, ControlStreamReader

FORMAT = "postgres-cdc"
CONTROL_FORMAT = "penstock-control"


class PostgresCdcSource(DataSource):
    """The changes of one table, typed, in order, as a stream.

    Options: `dsn`, `password`, `table` (schema.name), `slot`, `publication` (default: the slot's name), `spool` (a directory that the
    executors reach), `consumer` (default: derived from the table; queries that share a spool need one each), `maxRowsPerBatch`,
    `maxBytesPerBatch`, and the fields of `TypePolicy` and `CaptureLimits` in camel case (`onUnrepresentable`, `segmentRows`, …).
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return _spark_schema(self._change_schema())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        table = self._table()
        consumer = self.options.get("consumer") or f"spark-{table}"
        options = {**self.options, "tables": tables_option([table])}
        found = self._change_schema()
        if _spark_schema(found) != schema:
            raise SchemaChangedError(
                f"table {table} does not have the shape that the query was built with",
                hint="build the query anew with .load(), and give it no schema of its own",
            )
        return ChangeStreamReader(options, table, consumer, found)

    def _table(self) -> TableName:
        text = self.options.get("table")
        if not text:
            raise ConfigError("the option 'table' is missing", hint='add .option("table", "public.orders")')
        try:
            return TableName.parse(text)
        except ValueError as error:
            raise ConfigError(f"the option 'table' is {error}", hint='write it as in SQL: public.orders, or public."my orders"') from error

    def _change_schema(self) -> pa.Schema:
        settings = CaptureSettings.from_options(self.options)
        wanted = self._table()
        with connect(settings.address) as connection:
            for table in inspect_tables(connection):
                if table.name == wanted:
                    found = inspect_schema(connection, table, settings.types, settings.publication)
                    _check_names(found)
                    return change_schema(found)
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


def _check_names(table: TableSchema) -> None:
    reserved = sorted(METADATA_NAMES.intersection(table.column_names))
    if reserved:
        raise UnsupportedTableError(
            f"table {table.name} has a column named {reserved[0]!r}, a name that changes need for themselves", hint="rename the column"
        )


def _spark_schema(schema: pa.Schema) -> StructType:
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def register(spark: SparkSession) -> None:
    """Make `postgres-cdc` known to this session. Needed only where Spark does not find it by itself.

    Not the control stream, which pipelines register for themselves: Spark refuses a name in one session that another, active one has
    registered, except for those that it finds by itself.
    """
    spark.dataSource.register(PostgresCdcSource)
