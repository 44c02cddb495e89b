"""Names and shapes of tables, as every layer shares them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Self

import pyarrow as pa

GEOMETRY_TYPE = pa.struct([pa.field("srid", pa.int32()), pa.field("wkb", pa.binary(), metadata={"encoding": "wkb"})])
"""Shapes of PostGIS. The metadata is there because pyspark 4.1 stumbles over a field called `wkb` that has none."""

_PLAIN = r'[^".\s]+'
_PART = rf'"(?:[^"]|"")+"|{_PLAIN}'
_NAME = re.compile(rf"({_PART})\.({_PART})")


@dataclass(frozen=True, order=True, slots=True)
class TableName:
    """A schema-qualified name, exactly as the catalog has it: case is kept, nothing is folded."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `schema.table`; a part with a dot, a quote or blanks stands in double quotes, as in SQL."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"not a table name of the form schema.table: {text!r}")
        return cls(_unquoted(match[1]), _unquoted(match[2]))

    def __str__(self) -> str:
        return f"{_quoted(self.schema)}.{_quoted(self.name)}"


def _quoted(part: str) -> str:
    if re.fullmatch(_PLAIN, part):
        return part
    escaped = part.replace('"', '""')
    return f'"{escaped}"'


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


@dataclass(frozen=True, slots=True)
class Column:
    """One column: how Postgres declares it, and the Arrow type that its values get."""

    name: str
    arrow_type: pa.DataType
    type_oid: int
    type_modifier: int = -1
    reader: str = ""
    """How the values' text is read, as `postgres.types` names it; empty if it is text, or if a built-in `type_oid` says it."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """How the catalog counts a table's columns: a number is never given twice, whatever is renamed, dropped or added."""

    numbers: tuple[int, ...]
    """Of the columns, in table order."""
    width: int
    """The greatest number that was given out by then, to whatever column."""
    heap: str
    """Changes when the rows are rewritten or emptied, and when a partition comes or goes."""
    source: tuple[Column, ...] | None = None
    """The columns that are numbered, where those of the table are made of them by a transform."""
    made_by: str = ""
    """Which transform it was."""
    hidden_key: tuple[str, ...] = ()
    """Generated columns of the key that the stream does not carry, so that `TableSchema.key` alone does not identify rows."""


@dataclass(frozen=True, slots=True)
class Members:
    """The tables that are routed into one, and the column that says from which of them a row is."""

    source_column: str
    schemas: tuple[TableSchema, ...]
    """In name order."""


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A table as of one place in the log. `key` names the columns that tell rows apart, in table order; empty if none do."""

    oid: int
    name: TableName
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    attributes: Attributes | None = field(default=None, compare=False)
    """Where the catalog was asked: the log does not have them."""
    members: Members | None = field(default=None, compare=False)
    """Of a table that the source does not have, into which others are routed. `oid` is then a number made of all of them."""

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def with_key(self, key: Collection[str]) -> TableSchema:
        return replace(self, key=key_in_order(key, self.column_names))


def key_in_order(key: Collection[str], columns: Collection[str]) -> tuple[str, ...]:
    """A key in the order of the table. One of which a column is gone, by a rename or a drop, tells nothing apart any more, and is empty."""
    names = tuple(name for name in columns if name in key)
    return names if len(names) == len(key) else ()
