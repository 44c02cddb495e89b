"""`enrich`: join a stream with a reference table inside a Spark query.

One Python function processes each batch of the stream. It finds the rows in the worker's copy of the
reference table, or looks them up at the source. Spark does not shuffle, and the order of the stream is
preserved.
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
from penstock.reference.history import family
from penstock.reference.join import Enrichment, KeptFinder, LookupFinder, ReferenceFinder
from penstock.reference.keeper import KeptReference

_PATIENCE_SECONDS = 120.0

_FAMILIES: dict[type[spark_types.DataType], str] = {
    **dict.fromkeys(
        (
            spark_types.ByteType,
            spark_types.ShortType,
            spark_types.IntegerType,
            spark_types.LongType,
            spark_types.DecimalType,
        ),
        "number",
    ),
    **dict.fromkeys((spark_types.FloatType, spark_types.DoubleType), "floating point"),
    **dict.fromkeys((spark_types.StringType, spark_types.VarcharType, spark_types.CharType), "text"),
    spark_types.BinaryType: "bytes",
    spark_types.BooleanType: "boolean",
    spark_types.DateType: "date",
    spark_types.TimestampType: "instant",
    spark_types.TimestampNTZType: "timestamp",
}
"""The family of each Spark type, with the names that `family` returns for Arrow types. Values of one family
can be compared.
"""


@dataclass(frozen=True, slots=True)
class LookupReference:
    """A table that executors query by key, with a cache in each worker.

    Found rows are cached for `ttl_seconds`, missing ones for `negative_ttl_seconds`. A result may be as old
    as these times, and a repeated batch may get other results. To join as of the commit of each change, use
    `keep` instead.
    """

    table: KeyedReferenceTable
    ttl_seconds: float = 60.0
    negative_ttl_seconds: float = 5.0
    max_entries: int = 100_000

    def __post_init__(self) -> None:
        if min(self.ttl_seconds, self.negative_ttl_seconds) < 0 or self.max_entries < 1:
            raise ConfigError(
                "cache times must be 0 or more, and the cache must have at least one entry",
                hint="leave them out for the defaults",
            )


def lookup(
    table: KeyedReferenceTable,
    *,
    ttl_seconds: float = 60.0,
    negative_ttl_seconds: float = 5.0,
    max_entries: int = 100_000,
) -> LookupReference:
    """Look up rows by key, with a cache, in a table that is too large to keep."""
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
    """Add columns of a reference table to the stream: a left join by the reference table's key, with nulls
    for missing rows.

    `on` has the key columns, by their common names or as `{column of the stream: column of the key}`.
    `columns` are the columns to add, by default all except the key, each with `prefix` before its name.
    `matched` names a column that is true if a row was found.

    With a table kept `as_of_commit`, every change is joined with the table as of the commit of that change,
    even if a batch is repeated. Otherwise it is joined with the current table. Deletes and truncates get
    nulls. A change of the reference table does not emit earlier rows of the stream again.
    """
    table, finder, version = _strategy(stream, reference)
    pairs = _pairs(on, table.key)
    _check_types(stream, table.columns, pairs)
    names = (
        [name for name in table.columns.names if name not in table.key] if columns is None else list(columns)
    )
    shown = tuple((name, f"{prefix}{name}") for name in names)
    added = _added(stream, table.columns, shown, matched)
    types = {as_name: _plain(table.columns.field(name).type) for name, as_name in shown}
    enrichment = Enrichment(finder, pairs, shown, types, matched, version)
    return _mapped(stream, enrichment.run, StructType([*stream.schema.fields, *added]))


@dataclass(frozen=True, slots=True)
class _Shape:
    columns: pa.Schema
    key: tuple[str, ...]


def _strategy(
    stream: DataFrame, reference: KeptReference | LookupReference
) -> tuple[_Shape, ReferenceFinder, str | None]:
    if isinstance(reference, LookupReference):
        found = reference.table
        finder = LookupFinder(
            found,
            reference.ttl_seconds,
            reference.negative_ttl_seconds,
            reference.max_entries,
            secrets.token_hex(8),
        )
        return _Shape(found.schema(), found.key()), finder, None
    reference.check()
    if reference.as_of_commit and not _has_long(stream, COMMIT_VERSION):
        raise ConfigError(
            f"the stream has no column {COMMIT_VERSION}, so it cannot be joined as of a commit",
            hint="enrich the stream of changes itself, before other steps drop that column, or keep the "
            "table without as_of_commit",
        )
    version = COMMIT_VERSION if reference.as_of_commit else None
    finder_of_kept = KeptFinder(reference.directory, reference.identity, _PATIENCE_SECONDS)
    return _Shape(reference.columns, reference.key), finder_of_kept, version


def _has_long(stream: DataFrame, name: str) -> bool:
    return any(field.name == name and isinstance(field.dataType, LongType) for field in stream.schema.fields)


def _pairs(on: str | Sequence[str] | Mapping[str, str], key: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs of a column of the stream and a column of the key, in key order."""
    if isinstance(on, Mapping):
        given = {key_column: column for column, key_column in on.items()}
    else:
        given = {name: name for name in ([on] if isinstance(on, str) else on)}
    if set(given) != set(key) or len(given) != len(on if not isinstance(on, str) else [on]):
        raise ConfigError(
            f"a reference table is joined by its key, {', '.join(key)}, but 'on' has "
            f"{', '.join(given) or 'nothing'}",
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
                f"column {name!r} of the stream is {fields[name].simpleString()}, and {key_column!r} of "
                "the reference table "
                f"{columns.field(key_column).type}: they cannot be compared",
                hint="cast the column of the stream first",
            )


def _plain(arrow_type: pa.DataType) -> pa.DataType:
    """The Arrow type to which Spark converts values of `arrow_type`."""
    if pa.types.is_large_string(arrow_type):
        return pa.string()
    if pa.types.is_large_binary(arrow_type):
        return pa.binary()
    if pa.types.is_timestamp(arrow_type):
        return pa.timestamp("us", arrow_type.tz)
    return arrow_type


def _mapped(stream: DataFrame, function: Callable[..., Any], schema: StructType) -> DataFrame:
    """`stream.mapInArrow` without its check for pandas, which classic Spark requires but does not use
    here.
    """
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
            f"column {field.name!r} of the reference table is {field.type}, which Spark does not support",
            hint="leave it out of columns",
        ) from error


def _added(
    stream: DataFrame, columns: pa.Schema, shown: Sequence[tuple[str, str]], matched: str | None
) -> list[StructField]:
    taken = set(stream.columns)
    added: list[StructField] = []
    for name, as_name in shown:
        if name not in columns.names:
            raise ConfigError(
                f"the reference table has no column {name!r}", hint=f"it has: {', '.join(columns.names)}"
            )
        added.append(StructField(as_name, _spark_type(columns.field(name))))
    if matched is not None:
        added.append(StructField(matched, BooleanType()))
    for field in added:
        if field.name in taken:
            raise ConfigError(
                f"the stream would have two columns {field.name!r}", hint="give a prefix, or choose columns"
            )
        taken.add(field.name)
    return added
