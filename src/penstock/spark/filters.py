"""Spark's filters as conditions of Postgres: which rows can be left out at the source.

A condition may let more rows through than its filter, never fewer, since Spark filters again. So only types whose order and equality are
the same on both sides take part; texts compare byte by byte, as Spark's do. `IS NULL` does not: a value that its type cannot hold is null
to Spark and is not to Postgres.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import (
    ColumnPath,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from penstock.postgres.predicates import compare, contains, is_comparable, is_one_of, is_present
from penstock.schema import Column, TableSchema

_OPERATORS: Mapping[type[Filter], str] = {
    EqualTo: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}
_TEXTS: Mapping[type[Filter], str] = {StringStartsWith: "starts", StringEndsWith: "ends", StringContains: "contains"}


def translate_filter(filter: Filter, table: TableSchema) -> str | None:
    """The condition, or None if the filter is not for the source."""
    if isinstance(filter, Not):
        return _negated(filter.child, table)
    column = _column(getattr(filter, "attribute", ()), table)
    if column is None:
        return None
    if isinstance(filter, IsNotNull):
        return is_present(column)
    if not is_comparable(column):
        return None
    return _compared(filter, column)


def _compared(filter: Filter, column: Column) -> str | None:
    value = getattr(filter, "value", None)
    if _holds_nul(value):
        return None
    if isinstance(filter, EqualNullSafe):
        return None if value is None else compare(column, "=", value)
    if isinstance(filter, In):
        return is_one_of(column, list(filter.value))
    if type(filter) in _TEXTS:
        return contains(column, str(value), _TEXTS[type(filter)])
    operator = _OPERATORS.get(type(filter))
    return None if operator is None or value is None else compare(column, operator, value)


def _negated(child: Filter, table: TableSchema) -> str | None:
    column = _column(getattr(child, "attribute", ()), table)
    if column is None or not is_comparable(column) or not isinstance(child, EqualTo) or child.value is None or _holds_nul(child.value):
        return None
    return compare(column, "<>", child.value)


def _holds_nul(value: object) -> bool:
    """Postgres has no text with a NUL in it, and refuses a statement that has."""
    texts = value if isinstance(value, tuple) else (value,)
    return any(isinstance(text, str) and "\0" in text for text in texts)


def _column(path: ColumnPath, table: TableSchema) -> Column | None:
    return next((column for column in table.columns if (column.name,) == tuple(path)), None)
