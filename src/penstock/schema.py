"""Table names and schemas, shared by every layer."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Self

import pyarrow as pa

GEOMETRY_TYPE = pa.struct(
    [pa.field("srid", pa.int32()), pa.field("wkb", pa.binary(), metadata={"encoding": "wkb"})]
)
"""PostGIS geometry. pyspark 4.1 fails on a field called `wkb` without metadata."""

_PLAIN = r'[^".\s]+'
_PART = rf'"(?:[^"]|"")+"|{_PLAIN}'
_NAME = re.compile(rf"({_PART})\.({_PART})")


@dataclass(frozen=True, order=True, slots=True)
class TableName:
    """A schema-qualified table name, exactly as in the catalog. Case is significant."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `schema.table`. A part with a dot, a quote or blanks must be in double quotes, as in SQL."""
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
    """One column: its Postgres type, and the Arrow type of its values."""

    name: str
    arrow_type: pa.DataType
    type_oid: int
    type_modifier: int = -1
    reader: str = ""
    """The decoder of the values, as named in `postgres.types`; empty for text, and for types known by a
    built-in `type_oid`.
    """


@dataclass(frozen=True, slots=True)
class Attributes:
    """Column numbers (`attnum`) and other catalog facts of a table.

    A number is never reused after a rename, drop or add.
    """

    numbers: tuple[int, ...]
    """The number of each column, in table order."""
    width: int
    """The greatest number assigned so far, including dropped columns."""
    heap: str
    """Differs after a table rewrite or TRUNCATE, and after a partition is attached or detached."""
    source: tuple[Column, ...] | None = None
    """The source's columns that the numbers belong to, if a transform derives the table's columns from them.
    """
    made_by: str = ""
    """Fingerprint of that transform."""
    hidden_key: tuple[str, ...] = ()
    """Generated key columns that logical replication does not send, so that `TableSchema.key` alone does not
    identify rows.
    """


@dataclass(frozen=True, slots=True)
class Members:
    """The tables that are routed into one target, and the column that names the source table of a row."""

    source_column: str
    schemas: tuple[TableSchema, ...]
    """Sorted by name."""


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A table's schema as of one position.

    `key` lists the key columns in table order; it is empty for a table without a key.
    """

    oid: int
    name: TableName
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    attributes: Attributes | None = field(default=None, compare=False)
    """Only set if the schema was read from the catalog; pgoutput does not send these facts."""
    members: Members | None = field(default=None, compare=False)
    """Only set for the target of routed tables, which does not exist in the source.

    `oid` is then derived from its members.
    """

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def with_key(self, key: Collection[str]) -> TableSchema:
        return replace(self, key=key_in_order(key, self.column_names))


def key_in_order(key: Collection[str], columns: Collection[str]) -> tuple[str, ...]:
    """The key in table order; empty if one of its columns was renamed or dropped, since the rest does not
    identify rows.
    """
    names = tuple(name for name in columns if name in key)
    return names if len(names) == len(key) else ()
