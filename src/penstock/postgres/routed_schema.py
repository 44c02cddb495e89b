"""The common schema of several tables that are routed into one target table, or the reason why they differ.
The members must have the same columns, in any order, and the same key. The routed table has the columns in
the order of its first member, by name, followed by the source column, which is part of the key. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from penstock.errors import MembersDifferError
from penstock.schema import Column, Members, TableName, TableSchema

_TEXT_OID = 25
_FIRST_OWN_OID = 16_384
_ROUTED = 1 << 62
_LISTED = 5


def is_routed(oid: int) -> bool:
    """Whether this number identifies a routed table; OIDs are far smaller."""
    return oid >= _ROUTED


def joined_schema(name: TableName, source_column: str, members: Sequence[TableSchema]) -> TableSchema:
    """The schema of the table `name` into which all `members` are routed. Raises the difference that prevents
    it.
    """
    first, *others = members = sorted(members, key=lambda member: member.name)
    differences = [words for other in others for words in _differences(first, other)]
    taken = [column for column in first.column_names if column.casefold() == source_column.casefold()]
    if taken:
        raise MembersDifferError(
            f"the tables that are routed into {name} have a column {taken[0]!r} themselves",
            hint="choose another source_column: for them",
        )
    if differences:
        more = f"; and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
        raise MembersDifferError(
            f"the tables that are routed into {name} differ: {'; '.join(differences[:_LISTED])}{more}",
            hint="make their columns and keys the same, or exclude those that differ; the target "
            "is then copied again",
        )
    columns = (*first.columns, Column(source_column, pa.string(), _TEXT_OID))
    key = (*first.key, source_column) if first.key else ()
    aligned = tuple(align(member, first) for member in members)
    return TableSchema(
        _identity(source_column, members), name, columns, key, members=Members(source_column, aligned)
    )


def align(member: TableSchema, first: TableSchema) -> TableSchema:
    """A member with its columns in the order of the first."""
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
        yield f"the key of {one.name} is {keys[0]}, and that of {other.name} {keys[1]}"


def _kind(column: Column) -> tuple[object, ...]:
    """User-defined types have another OID in each schema, and are equal here if their definitions are."""
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
