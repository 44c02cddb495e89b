"""Target columns that Spark computes from source columns, the query that computes them, and the check that a
target can store their types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyarrow import types

from penstock.postgres.types.registry import TEXT
from penstock.schema import Column, TableSchema
from penstock.spark.query import Analysis, Selected
from penstock.transforms.casts import (
    array_text,
    is_text_form,
    plain_text,
    postgres_type,
    typed,
    with_elements,
)
from penstock.transforms.columns import MadeColumn

_KINDS: Final = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "byte": pa.int16(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_OIDS: Final = {pa.float32(): 700, pa.binary(): 17}
_ARRAY_OIDS: Final = {
    16: 1000, 17: 1001, 20: 1016, 21: 1005, 23: 1007, 25: 1009, 700: 1021, 701: 1022,
    1082: 1182, 1114: 1115, 1184: 1185, 1700: 1231,
}  # fmt: skip
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


@dataclass(frozen=True, slots=True)
class Query:
    """A query that Spark evaluates for each row of a table. Sent to executors."""

    text: str
    condition_columns: tuple[str, ...] | None = None
    """The source columns that the query's condition depends on; None if the query has no condition."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A target column computed from any number of source columns."""

    name: str
    place: int
    """The column's index in the query's result."""
    needs: tuple[str, ...]
    arrow_type: pa.DataType
    is_text_form: bool = False
    """Whether the target column stores values as Postgres text."""

    @property
    def column(self) -> Column:
        oid, modifier = _postgres_type(self.arrow_type)
        if self.is_text_form:
            return Column(self.name, pa.string(), oid, modifier, TEXT)
        return Column(self.name, self.arrow_type, oid, modifier)

    def written(self, values: pa.Array) -> pa.Array:
        """Convert Spark's values to the target's form."""
        values = values.cast(self.arrow_type)
        return _text(values) if self.is_text_form else values


def read_kind(kind: str) -> pa.DataType | None:
    """Return the target type for a Spark type in JSON form; None if no target supports it."""
    return _type_of(json.loads(kind))


def _type_of(document: Any) -> pa.DataType | None:
    if isinstance(document, str):
        match = _DECIMAL.fullmatch(document)
        return _KINDS.get(document) if match is None else pa.decimal128(int(match[1]), int(match[2]))
    element = _type_of(document["elementType"]) if document.get("type") == "array" else None
    return None if element is None or types.is_list(element) else pa.list_(element)


def _postgres_type(arrow_type: pa.DataType) -> tuple[int, int]:
    if types.is_list(arrow_type):
        oid, modifier = _postgres_type(arrow_type.value_type)
        return _ARRAY_OIDS[oid], modifier
    return (_OIDS[arrow_type], -1) if arrow_type in _OIDS else postgres_type(arrow_type)


def _text(values: pa.Array) -> pa.Array:
    if types.is_list(values.type):
        return array_text(with_elements(values, _text(values.flatten())))
    if types.is_binary(values.type):
        return pa.array(
            [None if value is None else "\\x" + value.hex() for value in values.to_pylist()], pa.string()
        )
    return values.cast(pa.string()) if types.is_floating(values.type) else plain_text(values)


Analyse = Callable[[str, tuple[tuple[str, pa.DataType], ...]], Analysis]
"""Function that plans a query over a table with the given columns. Raises `ConfigError` if the query cannot
be evaluated row by row.
"""

TargetColumn = MadeColumn | Computed

_UNNAMED = re.compile(r"[\s(){},;=]")


def ask_spark(text: str, columns: tuple[tuple[str, pa.DataType], ...]) -> Analysis:
    """Plan a query with Spark. Starts Spark if it is not running, so call it only in the driver, or in a
    process that does not use Spark.
    """
    from penstock.spark.query_plan import analysed

    return analysed(text, columns)


def query_of(where: str) -> str:
    """Return the query for a filter condition. The closing bracket is on the next line, because the condition
    may end with a comment.
    """
    return f"SELECT * FROM source WHERE (\n{where}\n)"  # noqa: S608 - Spark checks the query first


def spark_columns(source: TableSchema) -> tuple[tuple[str, pa.DataType], ...]:
    """Return the name and the type of each column that a query can use. A column that is stored as text has
    the type of its values.
    """
    return tuple((column.name, typed(column).arrow_type) for column in source.columns)


def target_columns(analysis: Analysis, source: TableSchema) -> tuple[TargetColumn, ...]:
    """Return the target columns for the columns of a query's result. Raises `ValueError` with the reason if
    no target supports one of them.
    """
    return tuple(_target_column(each, place, source) for place, each in enumerate(analysis.columns))


def _target_column(selected: Selected, place: int, source: TableSchema) -> TargetColumn:
    if selected.is_plain:
        return MadeColumn(
            next(column for column in source.columns if column.name == selected.needs[0]), selected.name
        )
    if _UNNAMED.search(selected.name):
        raise ValueError(f"column {selected.name!r} has no name: write {selected.name} AS …")
    arrow_type = read_kind(selected.kind)
    if arrow_type is None:
        remedy = (
            "CAST(NULL AS …) gives null a type"
            if selected.kind == '"void"'
            else "to_json(…) makes a text of it, CAST(… AS …) another type"
        )
        raise ValueError(
            f"column {selected.name!r} would have the type {selected.kind}, which targets do not support: "
            f"{remedy}"
        )
    return Computed(selected.name, place, selected.needs, arrow_type, any(map(is_text_form, source.columns)))
