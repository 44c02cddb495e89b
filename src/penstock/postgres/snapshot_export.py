"""Export a snapshot and the position at which it is exact, and fingerprint the tables that are copied under
it.

The pair is obtained by creating a temporary logical slot: every transaction that commits up to its consistent
point is visible in the exported snapshot, every later one is not. The snapshot exists as long as the
connection that created the slot stays idle.

Rows that do not change keep their ctid, so chunks read under different snapshots can be combined while the
table's fingerprint stays the same. The fingerprint changes if the table was rewritten (another filenode), if
it gained or lost a partition, or if a column (a recreated column has another number), the key or the row
filter changed. It also changes if the table was out of the publication for some time, since the stream lacks
its changes from that time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from psycopg import sql

from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_schema
from penstock.postgres.connection import (
    Connection,
    SourceAddress,
    connect,
    connect_replication,
    replication_command,
)
from penstock.postgres.membership import inspect_memberships
from penstock.postgres.queries import publication_query, query
from penstock.postgres.server import inspect_blockers, log_wait
from penstock.postgres.slot import PLUGIN, OnWait
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName, TableSchema, joined_schema


def reader_name(snapshot: str | None) -> str:
    """Return the application name of sessions that read under an exported snapshot. The session that holds
    the snapshot counts its readers by this name.
    """
    return "penstock snapshot" if snapshot is None else f"penstock snapshot {snapshot}"


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """An exported snapshot. `name` is the argument of SET TRANSACTION SNAPSHOT; `fence` is the position at
    which the snapshot is exact.
    """

    name: str
    fence: Position


@contextmanager
def export_snapshot(
    address: SourceAddress, on_wait: OnWait = log_wait, _tables: Sequence[CatalogTable] = ()
) -> Iterator[ExportedSnapshot]:
    """Hold a snapshot open for the length of the block. Creating it waits for the transactions that are open
    at that moment. `on_wait` is called once a second with them; an exception from it ends the wait.
    """
    slot = f"penstock_snapshot_{os.getpid()}_{secrets.token_hex(4)}"
    command = sql.SQL("CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL {} EXPORT_SNAPSHOT").format(
        sql.Identifier(slot), sql.SQL(PLUGIN)
    )
    with connect_replication(address, "penstock snapshot") as connection:
        pid = connection.info.backend_pid

        def report_wait() -> None:
            with connect(address) as other:
                on_wait(inspect_blockers(other, pid))

        _, consistent, name, _ = replication_command(
            connection, command, "exporting a snapshot", on_wait=report_wait
        )
        yield ExportedSnapshot(name, Position.parse(consistent))


class Export(Protocol):
    """A function that exports a snapshot with its fence; `tables` are those that are copied under it."""

    def __call__(
        self, address: SourceAddress, on_wait: OnWait, tables: Sequence[CatalogTable] = (), /
    ) -> AbstractContextManager[ExportedSnapshot]: ...


@dataclass(frozen=True, slots=True)
class SharedSnapshot:
    """An exported snapshot without a position, and the connection that holds it."""

    name: str
    connection: Connection

    def count_readers(self) -> int:
        """Return the number of sessions of this role that currently read under this snapshot."""
        self.connection.execute("SELECT pg_catalog.pg_stat_clear_snapshot()")
        row: Any = self.connection.execute(
            query("replication", "chunk_readers"), {"application": reader_name(self.name)}
        ).fetchone()
        return int(row[0])


@contextmanager
def share_snapshot(address: SourceAddress) -> Iterator[SharedSnapshot]:
    """Hold a snapshot without a fence for the length of the block. The role needs no REPLICATION attribute,
    and open transactions are not waited for.
    """
    with connect(address, "penstock holder") as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row: Any = connection.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
        yield SharedSnapshot(row[0], connection)


_LOCK_SECONDS = 10


def session_lock_timeout() -> sql.Composed:
    """Return the statement that sets how long the session waits for a lock. After that time the caller tries
    another table.
    """
    return sql.SQL("SET lock_timeout = {}").format(sql.Literal(f"{_LOCK_SECONDS}s"))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A heap: the table itself, or one partition of it.

    `filenode` changes when the heap is rewritten or truncated.
    """

    oid: int
    name: TableName
    filenode: int


@dataclass(frozen=True, slots=True)
class KeyOperator:
    """The operator by which the key's index compares a column whose type is not built in."""

    type_name: str
    """The operand type of the operator, as SQL writes it."""
    equals: str | None
    """The operator with its schema, as SQL writes it. None if it is not trusted; the values are then compared
    as text.
    """
    delimiter: str = ","
    """The array delimiter of the type (`typdelim`); PostGIS uses a colon, for example."""


@dataclass(frozen=True, slots=True)
class CopyFingerprint:
    """A table's definition and storage. If two fingerprints of a table are equal, no rows were moved or
    removed without a change in the log.
    """

    schema: TableSchema
    numbers: tuple[int, ...]
    """The column numbers in the catalog."""
    key_types: tuple[str, ...]
    """The types of the key columns as SQL writes them, with their schema; for a domain, the base type."""
    row_filter: str | None
    """The row filter of the publication, as the server prints it. Rows that do not meet it are not copied."""
    membership: str | None
    """The `act` of the table's `Membership` in the publication; None if there is none."""
    is_partitioned: bool
    leaves: tuple[Leaf, ...]
    """The heaps of the table, ordered by OID."""
    fingerprint: str
    """A digest of the facts above and of others; see `inspect_fingerprint`."""
    members: tuple[CopyFingerprint, ...] = ()
    """The source tables that are routed into this table, with their columns in the order of this table.
    `leaves` are then the heaps of all members.
    """
    source_column: str = ""
    key_operators: Mapping[str, KeyOperator] = field(default_factory=dict, compare=False)
    """The operators of key columns that the index does not compare as a built-in type, by column name."""

    @property
    def parts(self) -> tuple[CopyFingerprint, ...]:
        """The tables that are read separately: the members, or the table itself."""
        return self.members or (self,)

    def constants(self, part: CopyFingerprint) -> tuple[tuple[str, str], ...]:
        """Return columns that a part does not have itself, each with the value for all rows of the part."""
        return ((self.source_column, str(part.schema.name)),) if self.members else ()

    def difference(self, other: CopyFingerprint) -> str | None:
        """Return the first difference from `other` in words; None if there is none."""
        compared = {
            "it was dropped and created again": (self.schema.oid, other.schema.oid),
            "its key changed": ((self.schema.key, self.key_types), (other.schema.key, other.key_types)),
            "its columns changed": (
                (self.schema.columns, self.numbers),
                (other.schema.columns, other.numbers),
            ),
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
    """A fingerprint, and the current size of each heap."""

    outline: CopyFingerprint
    leaf_bytes: dict[int, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.leaf_bytes.values())


def inspect_leaves(connection: Connection, oid: int) -> tuple[tuple[Leaf, ...], dict[int, int]]:
    """Return the heaps of a table, in order of OID, and the size of each by OID."""
    rows: list[Any] = connection.execute(query("catalog", "leaves"), {"oid": oid}).fetchall()
    leaves = [
        Leaf(leaf_oid, TableName(namespace, name), filenode)
        for leaf_oid, namespace, name, _, filenode in rows
    ]
    return tuple(sorted(leaves, key=lambda leaf: leaf.oid)), {row[0]: row[3] for row in rows}


def inspect_sizes(connection: Connection, oids: Sequence[int]) -> dict[int, int]:
    """Return the heap size of each table with its partitions, as of its last ANALYZE. Takes no lock."""
    rows: list[Any] = connection.execute(query("catalog", "sizes"), {"oids": list(oids)}).fetchall()
    return dict(rows)


def inspect_row_filter(connection: Connection, oid: int, publication: str | None) -> str | None:
    statement = publication_query(connection.info.server_version, "catalog", "row_filter")
    found: Any = connection.execute(statement, {"oid": oid, "publication": publication}).fetchone()
    return found[0] if found is not None else None


def inspect_fingerprint(connection: Connection, table: CatalogTable, publication: str | None) -> str:
    """Return a digest that changes whenever the table's fingerprint changes. Does not wait for locks."""
    if table.members:
        return "/".join(inspect_fingerprint(connection, member, publication) for member in table.members)
    row: Any = connection.execute(
        query("catalog", "fingerprint"), {"oid": table.oid, "publication": publication}
    ).fetchone()
    return str(row[0])


def inspect_outline(
    connection: Connection,
    table: CatalogTable,
    policy: TypePolicy | None = None,
    publication: str | None = None,
) -> MeasuredTable:
    """Inspect one table. Call it after the snapshot was taken: a rewrite between the two is then detected
    when the table is read. Raises `LockWaitError` if another session holds this table locked; locks on other
    tables do not matter.
    """
    if table.members:
        return _joined(
            table, [inspect_outline(connection, member, policy, publication) for member in table.members]
        )
    connection.execute(session_lock_timeout())
    schema = inspect_schema(connection, table, policy, publication)
    rows: list[Any] = connection.execute(query("catalog", "attributes"), {"oid": table.oid}).fetchall()
    attributes = {name: (number, type_name) for name, number, type_name in rows}
    leaves, sizes = inspect_leaves(connection, table.oid)
    fingerprint = CopyFingerprint(
        schema,
        tuple(attributes[name][0] for name in schema.column_names),
        tuple(attributes[name][1] for name in schema.key),
        inspect_row_filter(connection, table.oid, publication),
        _inspect_act(connection, table.name, publication),
        leaves != () and leaves[0].oid != table.oid,
        leaves,
        inspect_fingerprint(connection, table, publication),
        key_operators=_inspect_key_operators(connection, table.oid),
    )
    return MeasuredTable(fingerprint, sizes)


def _inspect_act(connection: Connection, table: TableName, publication: str | None) -> str | None:
    if publication is None:
        return None
    membership = inspect_memberships(connection, publication, [table]).get(table)
    return None if membership is None else membership.act


def _inspect_key_operators(connection: Connection, oid: int) -> dict[str, KeyOperator]:
    rows: list[Any] = connection.execute(query("catalog", "key_operators"), {"oid": oid}).fetchall()
    return {
        name: KeyOperator(type_name, equals, delimiter or ",") for name, type_name, equals, delimiter in rows
    }


def _joined(table: CatalogTable, members: Sequence[MeasuredTable]) -> MeasuredTable:
    schema = joined_schema(table.name, table.source_column, [member.outline.schema for member in members])
    assert schema.members is not None
    aligned = {each.name: each for each in schema.members.schemas}
    outlines = [_aligned(member.outline, aligned[member.outline.schema.name]) for member in members]
    leaves = sorted((leaf for outline in outlines for leaf in outline.leaves), key=lambda leaf: leaf.oid)
    memberships = [outline.membership or "" for outline in outlines]
    fingerprint = "/".join(outline.fingerprint for outline in outlines)
    joined = CopyFingerprint(
        schema,
        (),
        (),
        None,
        "/".join(memberships),
        False,
        tuple(leaves),
        fingerprint,
        tuple(outlines),
        table.source_column,
    )
    return MeasuredTable(joined, {oid: size for member in members for oid, size in member.leaf_bytes.items()})


def _aligned(outline: CopyFingerprint, schema: TableSchema) -> CopyFingerprint:
    """Return a member's fingerprint with its columns in the order of `schema`."""
    numbers = dict(zip(outline.schema.column_names, outline.numbers, strict=True))
    types = dict(zip(outline.schema.key, outline.key_types, strict=True))
    return replace(
        outline,
        schema=schema,
        numbers=tuple(numbers[name] for name in schema.column_names),
        key_types=tuple(types[name] for name in schema.key),
    )
