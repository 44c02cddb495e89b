"""`enrich`: the columns of a reference table beside those of a stream, inside a Spark query.

The rows stay in the executors: each batch of the stream goes through one Python function, which finds the rows of the reference table in
the worker's own copy of it, or looks them up. Nothing is shuffled, and the stream's order is kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import types as spark_types
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import BooleanType, LongType, StructField, StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from penstock.change import COMMIT_VERSION
from penstock.contracts.reference import KeyedReferenceTable
from penstock.errors import ConfigError
from penstock.reference.finding import KeptFinder, LookupFinder, ReferenceFinder
from penstock.reference.joining import Enrichment
from penstock.reference.keeping import KeptReference
from penstock.reference.keys import family

_PATIENCE_SECONDS = 120.0

_FAMILIES: dict[type[spark_types.DataType], str] = {
    **dict.fromkeys(
        (spark_types.ByteType, spark_types.ShortType, spark_types.IntegerType, spark_types.LongType, spark_types.DecimalType), "number"
    ),
    **dict.fromkeys((spark_types.FloatType, spark_types.DoubleType), "floating point"),
    **dict.fromkeys((spark_types.StringType, spark_types.VarcharType, spark_types.CharType), "text"),
    spark_types.BinaryType: "bytes",
    spark_types.BooleanType: "boolean",
    spark_types.DateType: "date",
    spark_types.TimestampType: "instant",
    spark_types.TimestampNTZType: "timestamp",
}
"""As `keys.family` has them."""


@dataclass(frozen=True, slots=True)
class LookupReference:
    """A table that is asked for rows by key, from the executors, and a cache for each of their workers.

    What was found counts for `ttl_seconds`, and what was not for `negative_ttl_seconds`; so the result is as old as that, and repeating a
    batch may give another one. For the row as of a change's own commit, keep the table instead.
    """

    table: KeyedReferenceTable
    ttl_seconds: float = 60.0
    negative_ttl_seconds: float = 5.0
    max_entries: int = 100_000

    def __post_init__(self) -> None:
        if min(self.ttl_seconds, self.negative_ttl_seconds) < 0 or self.max_entries < 1:
            raise ConfigError("a cache needs times of 0 or more, and room for one entry", hint="leave them out to have the defaults")


def lookup(
    table: KeyedReferenceTable, *, ttl_seconds: float = 60.0, negative_ttl_seconds: float = 5.0, max_entries: int = 100_000
) -> LookupReference:
    """Look rows up by key, with a cache, in a table that is too large to be kept."""
    return LookupReference(table, ttl_seconds, negative_ttl_seconds, max_entries)


def enrich(
    stream: DataFrame,
    reference: KeptReference | LookupReference,
    *,
    on: str | Sequence[str] | Mapping[str, str],
    columns: Sequence[str] | None = None,
    prefix: str = "",
    matched: str | None = None,
) -> DataFrame:
    """The stream with columns of a reference table beside its own, null where there is no row: a left join by the reference table's key.

    `on` names the columns of that key, as the stream calls them too, or as `{column of the stream: column of the key}`. `columns` are those
    that are wanted, by default all but the key, each under its name with `prefix` before it. `matched` names a column that is to say
    whether there was a row.

    With a table that is kept `as_of_commit`, every change is joined with the table as it was at the change's own commit, also when a batch
    is repeated; otherwise with the table as it is known when the batch runs. A change that takes rows away gets nulls. A change of the
    reference table does not bring rows of the stream again.
    """
    table, finder, version = _strategy(stream, reference)
    pairs = _pairs(on, table.key)
    _check_types(stream, table.columns, pairs)
    names = [name for name in table.columns.names if name not in table.key] if columns is None else list(columns)
    shown = tuple((name, f"{prefix}{name}") for name in names)
    added = _added(stream, table.columns, shown, matched)
    types = {as_name: _plain(table.columns.field(name).type) for name, as_name in shown}
    enrichment = Enrichment(finder, pairs, shown, types, matched, version)
    return _mapped(stream, enrichment.run, StructType([*stream.schema.fields, *added]))


@dataclass(frozen=True, slots=True)
class _Shape:
    columns: pa.Schema
    key: tuple[str, ...]


def _strategy(stream: DataFrame, reference: KeptReference | LookupReference) -> tuple[_Shape, ReferenceFinder, str | None]:
    if isinstance(reference, LookupReference):
        found = reference.table
        finder = LookupFinder(found, reference.ttl_seconds, reference.negative_ttl_seconds, reference.max_entries, secrets.token_hex(8))
        return _Shape(found.schema(), found.key()), finder, None
    reference.check()
    if reference.as_of_commit and not _has_long(stream, COMMIT_VERSION):
        raise ConfigError(
            f"the stream has no column {COMMIT_VERSION}, so nothing can be joined with it as of a commit",
            hint="enrich the stream of changes itself, before other steps drop that column, or keep the table without as_of_commit",
        )
    version = COMMIT_VERSION if reference.as_of_commit else None
    finder_of_kept = KeptFinder(reference.directory, reference.identity, _PATIENCE_SECONDS)
    return _Shape(reference.columns, reference.key), finder_of_kept, version


def _has_long(stream: DataFrame, name: str) -> bool:
    return any(field.name == name and isinstance(field.dataType, LongType) for field in stream.schema.fields)


def _pairs(on: str | Sequence[str] | Mapping[str, str], key: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """In the order of the key."""
    if isinstance(on, Mapping):
        given = {key_column: column for column, key_column in on.items()}
    else:
        given = {name: name for name in ([on] if isinstance(on, str) else on)}
    if set(given) != set(key) or len(given) != len(on if not isinstance(on, str) else [on]):
        raise ConfigError(
            f"a reference table is joined by its key, {', '.join(key)}, and 'on' names {', '.join(given) or 'nothing'}",
            hint="write on={'column of the stream': 'column of the key'} for every column of the key",
        )
    return tuple((given[name], name) for name in key)


def _check_types(stream: DataFrame, columns: pa.Schema, pairs: Sequence[tuple[str, str]]) -> None:
    fields = {field.name: field.dataType for field in stream.schema.fields}
    for name, key_column in pairs:
        if name not in fields:
            raise ConfigError(f"the stream has no column {name!r}", hint=f"it has: {', '.join(fields)}")
        ours, theirs = _FAMILIES.get(type(fields[name])), family(columns.field(key_column).type)
        if ours is None or ours != theirs:
            raise ConfigError(
                f"column {name!r} of the stream is {fields[name].simpleString()}, and {key_column!r} of the reference table "
                f"{columns.field(key_column).type}: they cannot be compared",
                hint="cast the column of the stream before",
            )


def _plain(arrow_type: pa.DataType) -> pa.DataType:
    """The form in which Spark takes values of a type over."""
    if pa.types.is_large_string(arrow_type):
        return pa.string()
    if pa.types.is_large_binary(arrow_type):
        return pa.binary()
    if pa.types.is_timestamp(arrow_type):
        return pa.timestamp("us", arrow_type.tz)
    return arrow_type


def _mapped(stream: DataFrame, function: Callable[..., Any], schema: StructType) -> DataFrame:
    """`stream.mapInArrow`. Where Spark is in this process, that refuses to work without pandas, which it has no use for."""
    if not isinstance(stream, ClassicDataFrame):
        return stream.mapInArrow(function, schema)
    whole = UserDefinedFunction(function, schema, evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    columns = [stream["`" + name.replace("`", "``") + "`"] for name in stream.columns]
    return ClassicDataFrame(stream._jdf.mapInArrow(whole(*columns)._jc, False, None), stream.sparkSession)  # noqa: SLF001


def _spark_type(field: pa.Field) -> spark_types.DataType:
    try:
        return from_arrow_type(field.type, prefer_timestamp_ntz=True)
    except PySparkException as error:
        raise ConfigError(
            f"column {field.name!r} of the reference table is {field.type}, which Spark does not have", hint="choose columns without it"
        ) from error


def _added(stream: DataFrame, columns: pa.Schema, shown: Sequence[tuple[str, str]], matched: str | None) -> list[StructField]:
    taken = set(stream.columns)
    added: list[StructField] = []
    for name, as_name in shown:
        if name not in columns.names:
            raise ConfigError(f"the reference table has no column {name!r}", hint=f"it has: {', '.join(columns.names)}")
        added.append(StructField(as_name, _spark_type(columns.field(name))))
    if matched is not None:
        added.append(StructField(matched, BooleanType()))
    for field in added:
        if field.name in taken:
            raise ConfigError(f"the stream would have two columns {field.name!r}", hint="give a prefix, or choose columns")
        taken.add(field.name)
    return added
