"""What has to stay as it is for pieces of a table that were read at different moments to belong together.

Rows that nobody touches stay where they are, so chunks read under one snapshot fit those read under a later one, unless the table was
rewritten in between (another filenode), gained or lost a partition, changed a column (a column dropped and made anew has the same name and
another number), its key or its row filter, or left the publication for a while, when its changes are in no log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psycopg import sql

from penstock.postgres.catalog import CatalogTable, inspect_schema
from penstock.postgres.connection import Connection
from penstock.postgres.publication import inspect_memberships
from penstock.postgres.queries import query
from penstock.postgres.routed import joined_schema
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableName, TableSchema

_LOCK_SECONDS = 10


def lock_patience(seconds: int = _LOCK_SECONDS) -> sql.Composed:
    """For the rest of a session: how long to wait for somebody who has a table to himself, before other tables have their turn."""
    return sql.SQL("SET lock_timeout = {}").format(sql.Literal(f"{seconds}s"))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A heap: the table itself, or one partition of it. `filenode` changes when it is rewritten or emptied."""

    oid: int
    name: TableName
    filenode: int


@dataclass(frozen=True, slots=True)
class KeyOperator:
    """How the index of the key compares a column of an extension's type."""

    type_name: str
    """Which the operator takes, as SQL writes it."""
    equals: str | None
    """The operator, as SQL writes it, schema and all; None: it is not to be trusted, and texts are compared."""


@dataclass(frozen=True, slots=True)
class TableOutline:
    """A table as the catalog has it; two that are equal mean that nothing in between moved rows in silence."""

    schema: TableSchema
    numbers: tuple[int, ...]
    """Of the columns, as the catalog counts them."""
    key_types: tuple[str, ...]
    """Of the key's columns, as SQL writes them, schema and all; of a domain, the type below it."""
    row_filter: str | None
    """Which rows the publication lets into the stream, as the server writes it; the others are no part of the table to us."""
    membership: str | None
    """Changes when the table leaves the publication and comes back."""
    is_partitioned: bool
    leaves: tuple[Leaf, ...]
    """By OID."""
    fingerprint: str
    """Of all of this and some more, as `inspect_fingerprint` has it."""
    members: tuple[TableOutline, ...] = ()
    """The tables that are routed into this one, their columns in its order. Its leaves are then theirs."""
    source_column: str = ""
    key_operators: Mapping[str, KeyOperator] = field(default_factory=dict, compare=False)
    """By column of the key, where the index does not compare it as a built-in type."""

    @property
    def parts(self) -> tuple[TableOutline, ...]:
        """What is read by itself: the members, or the table."""
        return self.members or (self,)

    def constants(self, part: TableOutline) -> tuple[tuple[str, str], ...]:
        """What all rows of a part have in columns that the part has not."""
        return ((self.source_column, str(part.schema.name)),) if self.members else ()

    def difference(self, other: TableOutline) -> str | None:
        """In words, what the first of the differences is; None if there is none."""
        compared = {
            "it was dropped and made anew": (self.schema.oid, other.schema.oid),
            "its key changed": ((self.schema.key, self.key_types), (other.schema.key, other.key_types)),
            "its columns changed": ((self.schema.columns, self.numbers), (other.schema.columns, other.numbers)),
            "its row filter changed": (self.row_filter, other.row_filter),
            "it left the publication and came back": (self.membership, other.membership),
            "its partitions changed": (self._heaps, other._heaps),
            "it was rewritten or emptied": (self.leaves, other.leaves),
            "it was altered": (self.fingerprint, other.fingerprint),
        }
        return next((words for words, (one, another) in compared.items() if one != another), None)

    @property
    def _heaps(self) -> tuple[tuple[int, TableName], ...]:
        return tuple((leaf.oid, leaf.name) for leaf in self.leaves)


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """An outline, and how large each heap is by now."""

    outline: TableOutline
    leaf_bytes: dict[int, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.leaf_bytes.values())


def inspect_leaves(connection: Connection, oid: int) -> tuple[tuple[Leaf, ...], dict[int, int]]:
    """The heaps of a table by OID, and the size of each."""
    rows: list[Any] = connection.execute(query("catalog", "leaves"), {"oid": oid}).fetchall()
    leaves = [Leaf(leaf_oid, TableName(namespace, name), filenode) for leaf_oid, namespace, name, _, filenode in rows]
    return tuple(sorted(leaves, key=lambda leaf: leaf.oid)), {row[0]: row[3] for row in rows}


def inspect_sizes(connection: Connection, oids: Sequence[int]) -> dict[int, int]:
    """Bytes of heap of each table, partitions and all, as far as they were known when it was last analysed. Takes no lock."""
    rows: list[Any] = connection.execute(query("catalog", "sizes"), {"oids": list(oids)}).fetchall()
    return dict(rows)


def inspect_row_filter(connection: Connection, oid: int, publication: str | None) -> str | None:
    found: Any = connection.execute(query("catalog", "row_filter"), {"oid": oid, "publication": publication}).fetchone()
    return found[0] if found is not None else None


def inspect_fingerprint(connection: Connection, table: CatalogTable, publication: str | None) -> str:
    """Stays the same for as long as the outline does. Waits for no lock, unlike the view of published tables, which opens all of them."""
    if table.members:
        return "/".join(inspect_fingerprint(connection, member, publication) for member in table.members)
    row: Any = connection.execute(query("catalog", "fingerprint"), {"oid": table.oid, "publication": publication}).fetchone()
    return str(row[0])


def inspect_outline(
    connection: Connection, table: CatalogTable, policy: TypePolicy | None = None, publication: str | None = None
) -> MeasuredTable:
    """Look at one table now. After a snapshot was taken: a table that is rewritten between the two is then found out when it is read.

    `LockWaitError` if somebody has the table to himself.
    """
    if table.members:
        return _joined(table, [inspect_outline(connection, member, policy, publication) for member in table.members])
    connection.execute(lock_patience())
    schema = inspect_schema(connection, table, policy, publication)
    rows: list[Any] = connection.execute(query("catalog", "attributes"), {"oid": table.oid}).fetchall()
    attributes = {name: (number, type_name) for name, number, type_name in rows}
    leaves, sizes = inspect_leaves(connection, table.oid)
    outline = TableOutline(
        schema,
        tuple(attributes[name][0] for name in schema.column_names),
        tuple(attributes[name][1] for name in schema.key),
        inspect_row_filter(connection, table.oid, publication),
        inspect_memberships(connection, publication, [table.name]).get(table.name) if publication is not None else None,
        leaves != () and leaves[0].oid != table.oid,
        leaves,
        inspect_fingerprint(connection, table, publication),
        key_operators=_inspect_key_operators(connection, table.oid),
    )
    return MeasuredTable(outline, sizes)


def _inspect_key_operators(connection: Connection, oid: int) -> dict[str, KeyOperator]:
    rows: list[Any] = connection.execute(query("catalog", "key_operators"), {"oid": oid}).fetchall()
    return {name: KeyOperator(type_name, equals) for name, type_name, equals in rows}


def _joined(table: CatalogTable, members: Sequence[MeasuredTable]) -> MeasuredTable:
    schema = joined_schema(table.name, table.source_column, [member.outline.schema for member in members])
    assert schema.members is not None
    aligned = {each.name: each for each in schema.members.schemas}
    outlines = [_aligned(member.outline, aligned[member.outline.schema.name]) for member in members]
    leaves = sorted((leaf for outline in outlines for leaf in outline.leaves), key=lambda leaf: leaf.oid)
    memberships = [outline.membership or "" for outline in outlines]
    fingerprint = "/".join(outline.fingerprint for outline in outlines)
    joined = TableOutline(
        schema, (), (), None, "/".join(memberships), False, tuple(leaves), fingerprint, tuple(outlines), table.source_column
    )
    return MeasuredTable(joined, {oid: size for member in members for oid, size in member.leaf_bytes.items()})


def _aligned(outline: TableOutline, schema: TableSchema) -> TableOutline:
    """A member's outline, with its columns, and what goes with them, in the order that `schema` has."""
    numbers = dict(zip(outline.schema.column_names, outline.numbers, strict=True))
    types = dict(zip(outline.schema.key, outline.key_types, strict=True))
    return replace(
        outline,
        schema=schema,
        numbers=tuple(numbers[name] for name in schema.column_names),
        key_types=tuple(types[name] for name in schema.key),
    )
