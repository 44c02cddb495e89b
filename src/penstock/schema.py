"""Table names and schemas, shared by every layer.

Several tables can be routed into one target table. They must have the same columns, in any order, and the
same key. The first member is the one whose name sorts first. The routed table has the columns of that member,
in the same order, and then the source column. The source column is part of the key.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import pyarrow as pa

from penstock.errors import MembersDifferError

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
    """The decoder of the values, as named in `postgres.types`; empty for text, and for built-in types, which
    `type_oid` identifies.
    """


@dataclass(frozen=True, slots=True)
class Attributes:
    """Column numbers (`attnum`) and other catalog facts of a table.

    Postgres never reuses a number: a renamed column keeps its number, and an added column gets a new one.
    """

    numbers: tuple[int, ...]
    """The number of each column, in table order."""
    width: int
    """The greatest column number assigned so far, also to columns that were dropped."""
    heap: str
    """A digest of the table's heaps. It differs after a table rewrite or TRUNCATE, and after a partition is
    attached or detached.
    """
    source: tuple[Column, ...] | None = None
    """If a transform derives the table's columns: the source's columns, to which `numbers` then belong.
    Otherwise None.
    """
    made_by: str = ""
    """Fingerprint of the transform that derives the table's columns; empty if there is none."""
    hidden_key: tuple[str, ...] = ()
    """Generated key columns that logical replication does not send, so that `TableSchema.key` alone does not
    identify rows.
    """


@dataclass(frozen=True, slots=True)
class Members:
    """The tables that are routed into one target, and the column that names the source table of a row."""

    source_column: str
    schemas: tuple[TableSchema, ...]
    """The schemas of these tables, sorted by table name."""


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
    """Only set for the table into which others are routed. That table does not exist in the source.

    `oid` is then derived from its members.
    """

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def with_key(self, key: Collection[str]) -> TableSchema:
        return replace(self, key=key_in_order(key, self.column_names))


def key_in_order(key: Collection[str], columns: Collection[str]) -> tuple[str, ...]:
    """The key columns in table order. Empty if one of them is not in `columns`, because it was renamed or
    dropped: the others alone do not identify rows.
    """
    names = tuple(name for name in columns if name in key)
    return names if len(names) == len(key) else ()


# --- routed tables ---------------------------------------------------------------------------------------

_TEXT_OID = 25
_FIRST_OWN_OID = 16_384
_ROUTED = 1 << 62
_LISTED = 5


def is_routed(oid: int) -> bool:
    """Whether this number identifies a routed table; OIDs of Postgres are far smaller."""
    return oid >= _ROUTED


def joined_schema(name: TableName, source_column: str, members: Sequence[TableSchema]) -> TableSchema:
    """The schema of the table `name` into which all `members` are routed. Raises `MembersDifferError` if the
    columns or keys of the members differ.
    """
    first, *others = members = sorted(members, key=lambda member: member.name)
    differences = [words for other in others for words in _differences(first, other)]
    taken = [column for column in first.column_names if column.casefold() == source_column.casefold()]
    if taken:
        raise MembersDifferError(
            f"the tables that are routed into {name} already have a column {taken[0]!r}, so the source "
            "column cannot have that name",
            hint=f"set source_column of {name} to another name",
        )
    if differences:
        more = f"; and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
        raise MembersDifferError(
            f"the tables that are routed into {name} differ: {'; '.join(differences[:_LISTED])}{more}",
            hint="make their columns and keys the same, or exclude the tables that differ; the target "
            "is then copied again",
        )
    columns = (*first.columns, Column(source_column, pa.string(), _TEXT_OID))
    key = (*first.key, source_column) if first.key else ()
    aligned = tuple(align(member, first) for member in members)
    return TableSchema(
        _identity(source_column, members), name, columns, key, members=Members(source_column, aligned)
    )


def align(member: TableSchema, first: TableSchema) -> TableSchema:
    """The schema `member` with its columns in the order of `first`."""
    own = {column.name: column for column in member.columns}
    attributes = member.attributes
    if attributes is not None:
        numbers = dict(zip(member.column_names, attributes.numbers, strict=True))
        attributes = replace(attributes, numbers=tuple(numbers[name] for name in first.column_names))
    return replace(
        member, columns=tuple(own[name] for name in first.column_names), key=first.key, attributes=attributes
    )


def is_same_shape(one: TableSchema, other: TableSchema) -> bool:
    """Whether both are the same table with the same columns, in any order, and the same key."""
    shapes = [
        {(each.name, each.type_oid, each.type_modifier, each.arrow_type) for each in schema.columns}
        for schema in (one, other)
    ]
    return (one.oid, one.name, set(one.key)) == (other.oid, other.name, set(other.key)) and shapes[
        0
    ] == shapes[1]


def _differences(one: TableSchema, other: TableSchema) -> Iterator[str]:
    mine, theirs = ({column.name: column for column in each.columns} for each in (one, other))
    for has, lacks, names in (
        (one, other, mine.keys() - theirs.keys()),
        (other, one, theirs.keys() - mine.keys()),
    ):
        yield from (f"{has.name} has a column {name!r}, and {lacks.name} has not" for name in sorted(names))
    for name, column in mine.items():
        if name in theirs and _kind(column) != _kind(theirs[name]):
            yield f"column {name!r} has another type in {other.name} than in {one.name}"
    if set(one.key) != set(other.key):
        keys = [f"({', '.join(each.key)})" if each.key else "none" for each in (one, other)]
        yield f"the key of {one.name} is {keys[0]}, and the key of {other.name} is {keys[1]}"


def _kind(column: Column) -> tuple[object, ...]:
    """The type facts in which members must agree. A user-defined type has a different OID in each schema, so
    only its Arrow type counts.
    """
    if column.type_oid >= _FIRST_OWN_OID:
        return (column.arrow_type,)
    return column.arrow_type, column.type_oid, column.type_modifier


def _identity(source_column: str, members: Sequence[TableSchema]) -> int:
    """A number that changes whenever a member is added, removed, renamed, recreated or altered."""
    facts = [
        (
            member.oid,
            str(member.name),
            sorted(member.key),
            sorted(
                (each.name, each.type_oid, each.type_modifier, str(each.arrow_type))
                for each in member.columns
            ),
            ()
            if member.attributes is None
            else sorted(zip(member.attributes.numbers, member.column_names, strict=True)),
        )
        for member in members
    ]
    digest = hashlib.sha256(json.dumps([source_column, facts]).encode()).digest()
    return _ROUTED | int.from_bytes(digest[:8]) >> 3
