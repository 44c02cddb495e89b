"""Keys that changed while a table was being copied, and their rows, as DataFrames: between the spool, the source and the target."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.change import EXACT, EXACT_TYPE
from penstock.schema import TableSchema
from penstock.sinks.base import ChangedRows
from penstock.sinks.collapse import THERE, match_column, match_text_column, value_column
from penstock.sinks.names import quoted


def text_column(index: int) -> str:
    """What the source is asked for, for each column of the key."""
    return f"text_{index}"


def changed_keys(changes: DataFrame, schema: TableSchema, constants: Sequence[str] = ()) -> DataFrame:
    """Every key that `changes` show, each once: as it stands in the target, and as the source reads it.

    `constants`: what further columns of the target's key, which the source has not, are in all of them.
    """
    columns = {column.name: column.arrow_type for column in schema.columns}
    parts = []
    for at, name in enumerate(schema.key):
        parts.append(F.col(quoted(name)).alias(match_column(at)))
        parts.append(F.col(EXACT)[name].alias(match_text_column(at)))
    keys = changes.select(*parts).distinct()
    texts = [
        F.coalesce(F.col(match_text_column(at)), _written(F.col(match_column(at)), columns[name])).alias(text_column(at))
        for at, name in enumerate(schema.key)
    ]
    more = [F.lit(value).alias(match_column(at)) for at, value in enumerate(constants, len(schema.key))]
    none = [F.lit(None).cast("string").alias(match_text_column(at)) for at, _ in enumerate(constants, len(schema.key))]
    return keys.select("*", *texts, *more, *none)


def _written(value: Column, arrow_type: pa.DataType) -> Column:
    """As Postgres reads it, with its clock set to UTC as Spark's is."""
    if pa.types.is_binary(arrow_type):
        return F.concat(F.lit("\\x"), F.hex(value))
    return value.cast("string")


def row_schema(columns: pa.Schema) -> pa.Schema:
    """Of the files in `ChangedRows.rows`: names of ours, since the table's own may be any."""
    fields = [pa.field(value_column(index), field.type) for index, field in enumerate(columns)]
    return pa.schema([*fields, pa.field(EXACT, EXACT_TYPE)])


def replacements(session: SparkSession, columns: pa.Schema, key: Sequence[str], changed: ChangedRows) -> DataFrame:
    """The rows to put in, and before them, with `_there`, the keys to take out."""
    struct = from_arrow_schema(row_schema(columns), prefer_timestamp_ntz=True)
    matches = [name for at in range(len(key)) for name in (match_column(at), match_text_column(at))]
    keys = session.read.parquet(changed.keys).select(*matches, F.lit(True).alias(THERE))
    rows = session.read.schema(struct).parquet(*changed.rows) if changed.rows else session.createDataFrame([], struct)
    return keys.unionByName(rows.withColumn(THERE, F.lit(False)), allowMissingColumns=True)
