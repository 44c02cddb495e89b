"""Data source `format("postgres-cdc")`.

Spark creates a new data source object whenever it needs one, even if only to ask for the schema. So these
objects have no state; the readers do the work.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from penstock.change import METADATA_NAMES, change_schema
from penstock.errors import ConfigError, SchemaChangedError, UnsupportedTableError
from penstock.postgres.catalog import inspect_schema
from penstock.postgres.connection import connect
from penstock.schema import TableSchema
from penstock.spark.batch import CurrentRowsReader
from penstock.spark.envelope import ENVELOPE_SCHEMA
from penstock.spark.request import FORMAT, SourceRequest
from penstock.spark.start import choose_tables
from penstock.spark.stream import EnvelopeStreamReader, TableStreamReader

__all__ = ["FORMAT", "PostgresCdcSource", "register"]


class PostgresCdcSource(DataSource):
    """Changes as a stream, typed for one table or as envelopes for many; and the current rows of one table as
    a batch.

    `penstock.spark.options` declares the options.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        """The schema of both stream and batch: Spark does not say for which of them it asks."""
        request = SourceRequest.parse(self.options)
        if request.choice.single is None:
            return _spark_schema(ENVELOPE_SCHEMA)
        return _spark_schema(_chosen(change_schema(_inspect_table(request)), request))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        request = SourceRequest.parse(self.options)
        if request.columns:
            raise ConfigError(
                "the option 'columns' is only for spark.read",
                hint="choose columns of the stream with .select(…)",
            )
        if request.choice.single is None:
            _check_same(ENVELOPE_SCHEMA, schema, "the envelope")
            return EnvelopeStreamReader(request)
        found = change_schema(_inspect_table(request))
        _check_same(found, schema, f"table {request.choice.single}")
        return TableStreamReader(request, found)

    def reader(self, schema: StructType) -> DataSourceReader:
        request = SourceRequest.parse(self.options)
        if request.choice.single is None:
            raise ConfigError(
                "the option 'table' is missing",
                hint='spark.read takes one table: .option("table", "public.orders")',
            )
        table = _inspect_table(request)
        found = _chosen(change_schema(table), request)
        _check_same(found, schema, f"table {request.choice.single}")
        return CurrentRowsReader(request, table, found)


def _inspect_table(request: SourceRequest) -> TableSchema:
    """The current schema of the requested table."""
    settings = request.capture()
    with connect(settings.address) as connection:
        (table,) = choose_tables(connection, request)
        found = inspect_schema(connection, table, settings.types, settings.publication)
    reserved = sorted(METADATA_NAMES.intersection(found.column_names))
    if reserved:
        raise UnsupportedTableError(
            f"table {found.name} has a column named {reserved[0]!r}, a name reserved for the metadata of "
            "changes",
            hint="rename the column",
        )
    return found


def _chosen(schema: pa.Schema, request: SourceRequest) -> pa.Schema:
    for name in request.columns:
        if name not in schema.names:
            raise ConfigError(
                f"table {request.choice} has no column {name!r}", hint=f"it has: {', '.join(schema.names)}"
            )
    return pa.schema([schema.field(name) for name in request.columns]) if request.columns else schema


def _check_same(found: pa.Schema, schema: StructType, what: str) -> None:
    if _spark_schema(found) != schema:
        raise SchemaChangedError(
            f"{what} does not have the schema that the query was built with",
            hint="build the query again with .load(), and do not set a schema",
        )


def _spark_schema(schema: pa.Schema) -> StructType:
    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def register(spark: SparkSession) -> None:
    """Register `postgres-cdc` in this session. Needed only if Spark does not discover the module
    `pyspark_penstock`.

    This does not register the control stream: a pipeline does that in its own session. Spark rejects the
    registration of a name that another active session has registered, unless Spark discovered that data
    source itself.
    """
    spark.dataSource.register(PostgresCdcSource)
