"""Spark DataFrames of spooled changes and of the keys that changed during a snapshot, and quoting for Spark
SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type

from penstock.change import (
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    EXACT,
    ORDINAL,
    XID,
    change_schema,
)
from penstock.schema import TableSchema
from penstock.sinks.repair_files import match_column, match_text_column, text_column
from penstock.spool.reader import FileSlice


def quoted(name: str) -> str:
    """Quote a name for Spark SQL, in backticks."""
    escaped = name.replace("`", "``")
    return f"`{escaped}`"


def sql_type(arrow_type: pa.DataType) -> str:
    """The Spark SQL type of an Arrow type, as written in a column definition."""
    return str(from_arrow_type(arrow_type, prefer_timestamp_ntz=True).simpleString())


def text_literal(text: str) -> str:
    """Quote a text as a string literal of Spark SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def load_changes(spark: SparkSession, schema: TableSchema, slices: Sequence[FileSlice]) -> DataFrame:
    """A DataFrame of the changes in `slices`, with the types of `schema`. Executors read the files later;
    this function only checks that they exist.
    """
    struct = from_arrow_schema(change_schema(schema), prefer_timestamp_ntz=True)
    alike: dict[tuple[object, ...], list[FileSlice]] = {}
    for slice in slices:
        alike.setdefault((slice.file.commit_version, slice.after, slice.upto, slice.excluded), []).append(
            slice
        )
    frames = [
        _narrowed(spark.read.schema(struct).parquet(*(str(slice.path) for slice in group)), group[0])
        for group in alike.values()
    ]
    return reduce(DataFrame.unionByName, frames)


def _narrowed(frame: DataFrame, slice: FileSlice) -> DataFrame:
    file = slice.file
    if file.commit_version is None:
        return _without(frame.where(_within(slice)) if slice.needs_filter else frame, slice)
    known = {
        COMMIT_VERSION: F.lit(file.commit_version.value).cast("bigint"),
        COMMIT_TIMESTAMP: F.lit(file.commit_timestamp).cast("timestamp"),
    }
    if file.xid is not None:
        known[XID] = F.lit(file.xid).cast("bigint")
    return _without(frame.withColumns(known), slice)


def _without(frame: DataFrame, slice: FileSlice) -> DataFrame:
    if not slice.excluded:
        return frame
    names = [f"{version}/{ordinal}" for version, ordinal in slice.excluded]
    return frame.where(~F.concat_ws("/", COMMIT_VERSION, ORDINAL).isin(names))


def _within(slice: FileSlice) -> Column:
    condition = F.lit(True)
    if slice.after is not None:
        condition &= F.col(COMMIT_VERSION) > slice.after.value
    if slice.upto is not None:
        condition &= F.col(COMMIT_VERSION) <= slice.upto.value
    return condition


def changed_keys(changes: DataFrame, schema: TableSchema, constants: Sequence[str] = ()) -> DataFrame:
    """The distinct keys in `changes`, in two forms: as the target stores them (`match_<j>`,
    `match_text_<j>`), and as text that the source can parse (`text_<j>`).

    `constants` are the values of further key columns that only the target has.
    """
    columns = {column.name: column.arrow_type for column in schema.columns}
    parts = []
    for at, name in enumerate(schema.key):
        parts.append(F.col(quoted(name)).alias(match_column(at)))
        parts.append(F.col(EXACT)[name].alias(match_text_column(at)))
    keys = changes.select(*parts).distinct()
    texts = [
        F.coalesce(F.col(match_text_column(at)), _written(F.col(match_column(at)), columns[name])).alias(
            text_column(at)
        )
        for at, name in enumerate(schema.key)
    ]
    more = [F.lit(value).alias(match_column(at)) for at, value in enumerate(constants, len(schema.key))]
    none = [
        F.lit(None).cast("string").alias(match_text_column(at))
        for at, _ in enumerate(constants, len(schema.key))
    ]
    return keys.select("*", *texts, *more, *none)


def _written(value: Column, arrow_type: pa.DataType) -> Column:
    """The value as text that Postgres can parse. Both sessions, that of Spark and that of Postgres, must have
    the time zone UTC.
    """
    if pa.types.is_binary(arrow_type):
        return F.concat(F.lit("\\x"), F.hex(value))
    return value.cast("string")
