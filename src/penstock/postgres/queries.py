"""SQL text: named statements from the `.sql` files of this package, quoted identifiers, and conditions for
WHERE clauses.

Conditions are built only for types whose values compare alike in Postgres and Arrow: integers, decimals,
booleans, dates, timestamps and texts. Texts compare byte by byte, with the "C" collation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, LiteralString

import pyarrow as pa
from psycopg import sql

from penstock.schema import Column

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_PUBLISHED = "-- include: published"
SCHEMAS_VERSION = 150_000
"""The first version whose publications may have schemas, column lists and row filters."""


@cache
def _load(file: str) -> dict[str, str]:
    text = files("penstock.postgres").joinpath("sql", file).read_text(encoding="utf-8")
    parts = _NAME.split(text)[1:]
    return dict(zip(parts[::2], (body.strip() for body in parts[1::2]), strict=True))


def query(file: str, name: str) -> LiteralString:
    """Return the statement called `name` in `sql/<file>.sql`. The files are part of the package, so the text
    counts as a `LiteralString`.
    """
    statement: Any = _load(f"{file}.sql")[name]
    return statement  # type: ignore[no-any-return]


def publication_query(server_version: int, file: str, name: str) -> LiteralString:
    """As `query`, for a statement that reads from the CTE `published`. The CTE's definition for this server
    version replaces the line `-- include: published`.
    """
    published = query("published", "catalog" if server_version >= SCHEMAS_VERSION else "view")
    return query(file, name).replace(_PUBLISHED, published)


def identifier(*parts: str) -> str:
    """Return the quoted name, for SQL statements in messages."""
    return sql.Identifier(*parts).as_string()


# Type OIDs. `_ORDERED`: bool, int8, int2, int4, date, timestamp, timestamptz, numeric. `_TEXTS`: text,
# varchar.
_NUMERIC = 1700
_ORDERED = frozenset({16, 20, 21, 23, 1082, 1114, 1184, _NUMERIC})
_TEXTS = frozenset({25, 1043})
_OPERATORS: dict[str, LiteralString] = {"=": "=", "<>": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_ESCAPED = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_"})


def is_comparable(column: Column) -> bool:
    if column.type_oid == _NUMERIC and not pa.types.is_decimal(column.arrow_type):
        return False  # it is text in Arrow, where 1.0 differs from 1 and 10 sorts before 9
    return column.type_oid in _ORDERED | _TEXTS


def is_present(column: Column) -> str:
    """Return the SQL condition that the column is not null. IS NOT NULL would be false for a composite value
    with a null in any of its fields.
    """
    return sql.SQL("{} IS DISTINCT FROM NULL").format(sql.Identifier(column.name)).as_string()


def compare(column: Column, operator: str, value: Any) -> str:
    return (
        sql.SQL("{} {} {}")
        .format(_operand(column), sql.SQL(_OPERATORS[operator]), sql.Literal(value))
        .as_string()
    )


def is_one_of(column: Column, values: Sequence[Any]) -> str:
    """Return the SQL condition that the column equals one of `values`. It is false for all rows if `values`
    contains only nulls.
    """
    literals = [sql.Literal(value) for value in values if value is not None]
    if not literals:
        return "false"
    return sql.SQL("{} IN ({})").format(_operand(column), sql.SQL(", ").join(literals)).as_string()


def contains(column: Column, text: str, where: str) -> str | None:
    """Return the SQL condition that the column contains `text`; None if the column's type is not text.
    `where` is `starts`, `ends` or `contains`.
    """
    if column.type_oid not in _TEXTS:
        return None
    pattern = text.translate(_ESCAPED)
    pattern = pattern + "%" if where != "ends" else pattern
    pattern = "%" + pattern if where != "starts" else pattern
    return sql.SQL("{} LIKE {}").format(_operand(column), sql.Literal(pattern)).as_string()


def _operand(column: Column) -> sql.Composed:
    name = sql.Identifier(column.name)
    return sql.SQL('{} COLLATE "C"').format(name) if column.type_oid in _TEXTS else sql.SQL("{}").format(name)
