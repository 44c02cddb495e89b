"""Conditions on columns, as text for the end of a WHERE clause.

Only for types whose values compare alike here and in Arrow: whole numbers, decimals, booleans, dates, timestamps, uuid and texts. A text
compares byte by byte, by its "C" collation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, LiteralString

import pyarrow as pa
from psycopg import sql

from penstock.schema import Column

# bool, int8, int2, int4, date, timestamp, timestamptz, numeric; then text, varchar.
_NUMERIC = 1700
_ORDERED = frozenset({16, 20, 21, 23, 1082, 1114, 1184, _NUMERIC})
_TEXTS = frozenset({25, 1043})
_OPERATORS: dict[str, LiteralString] = {"=": "=", "<>": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_ESCAPED = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_"})


def is_comparable(column: Column) -> bool:
    if column.type_oid == _NUMERIC and not pa.types.is_decimal(column.arrow_type):
        return False  # a text there, where 1.0 is not 1 and 10 comes before 9
    return column.type_oid in _ORDERED | _TEXTS


def is_present(column: Column) -> str:
    """Not by IS NOT NULL, which is false for a composite value with a null in any of its fields."""
    return sql.SQL("{} IS DISTINCT FROM NULL").format(sql.Identifier(column.name)).as_string()


def compare(column: Column, operator: str, value: Any) -> str:
    return sql.SQL("{} {} {}").format(_operand(column), sql.SQL(_OPERATORS[operator]), sql.Literal(value)).as_string()


def is_one_of(column: Column, values: Sequence[Any]) -> str:
    """True for none of the rows if `values` holds nothing but null."""
    literals = [sql.Literal(value) for value in values if value is not None]
    if not literals:
        return "false"
    return sql.SQL("{} IN ({})").format(_operand(column), sql.SQL(", ").join(literals)).as_string()


def contains(column: Column, text: str, where: str) -> str | None:
    """`where` is `starts`, `ends` or `contains`."""
    if column.type_oid not in _TEXTS:
        return None
    pattern = text.translate(_ESCAPED)
    pattern = pattern + "%" if where != "ends" else pattern
    pattern = "%" + pattern if where != "starts" else pattern
    return sql.SQL("{} LIKE {}").format(_operand(column), sql.Literal(pattern)).as_string()


def _operand(column: Column) -> sql.Composed:
    name = sql.Identifier(column.name)
    return sql.SQL('{} COLLATE "C"').format(name) if column.type_oid in _TEXTS else sql.SQL("{}").format(name)
