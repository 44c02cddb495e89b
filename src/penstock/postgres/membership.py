"""Publication membership of tables: whether a table was published without interruption and is still the same
table, and whether its partitions log the key that the stream announces.

For each change, the server reads from its catalog as of that change whether the table is published. A table
that was removed from the publication and added again looks unchanged afterwards, and so does a new table with
the name of a dropped one; but the stream lacks changes. So a reader stores each table's OID and the catalog
entry that publishes it, and compares them after a restart.

With `publish_via_partition_root` a Relation message describes the root and flags the root's key, but each
partition logs old keys by its own replica identity. If the partition's replica identity lacks a column of the
root's key, a delete contains NULL for that column, and an update that changes only that column has no old
key. The reader then cannot identify the row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PartitionIdentityError
from penstock.postgres.catalog import inspect_tables
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.publication import inspect_publication, inspect_relations
from penstock.postgres.queries import SCHEMAS_VERSION, identifier, query
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class PartitionMismatch:
    """A partition whose old keys lack columns that identify rows of its root. If whole old rows are
    requested, it may also be the root itself: a partition has replica identity FULL, but the root does not.
    """

    root: TableName
    partition: TableName
    announced: tuple[str, ...]
    """The root's key in the stream. Empty if the root has no key; its rows can then be identified only by the
    whole row.
    """
    logged: tuple[str, ...]
    """The columns of the partition's old keys."""
    identity: str
    """The required replica identity, as in ALTER TABLE … REPLICA IDENTITY."""
    promises_whole: bool
    """Whether the root has REPLICA IDENTITY FULL, so that the stream marks its old rows as whole."""

    @property
    def fix(self) -> str:
        """The statement that sets the required replica identity."""
        return (
            f"ALTER TABLE {identifier(self.partition.schema, self.partition.name)} REPLICA IDENTITY "
            f"{self.identity};"
        )


def inspect_partition_identities(
    connection: Connection,
    tables: Collection[TableName],
    publication: str,
    *,
    old_rows: bool = False,
    unkeyed: Collection[TableName] = (),
) -> list[PartitionMismatch]:
    """Return the mismatches of `tables`, in name order. The result is empty if `publication` exists and
    publishes neither updates nor deletes. `unkeyed` are tables with table mode append, whose roots need no
    key. With `old_rows`, whole old rows are requested: if the root or a partition of a table has replica
    identity FULL, the root and all partitions need it. Executes one statement.
    """
    wanted = sorted(set(tables))
    if not wanted:
        return []
    names = {"schemas": [table.schema for table in wanted], "names": [table.name for table in wanted]}
    parameters = {**names, "publication": publication, "whole": old_rows}
    rows: list[Any] = connection.execute(query("publication", "partition_identities"), parameters).fetchall()
    found = [_mismatch(row) for row in rows]
    needless = set() if old_rows else set(unkeyed)
    return [each for each in found if each.announced or each.promises_whole or each.root not in needless]


def describe_mismatches(mismatches: Sequence[PartitionMismatch]) -> str:
    """Describe the mismatches of one table, for an error message."""
    first = mismatches[0]
    needed = "whole old rows" if first.identity == "FULL" else _columns(first.announced)
    parts = "; ".join(map(_describe, mismatches))
    return (
        f"old rows of table {first.root} are identified by {needed}, and {parts}: deletes and updates "
        "would miss their rows"
    )


def _describe(mismatch: PartitionMismatch) -> str:
    if mismatch.partition == mismatch.root:
        return f"the table itself announces {_columns(mismatch.logged)}"
    return f"partition {mismatch.partition} logs {_columns(mismatch.logged)}"


def check_partition_identities(
    connection: Connection, tables: Collection[TableName], publication: str, *, old_rows: bool = False
) -> None:
    """Raise `PartitionIdentityError` if `tables` have mismatches. The error names all of them, and its hint
    has a statement that fixes each.
    """
    found = inspect_partition_identities(connection, tables, publication, old_rows=old_rows)
    if found:
        roots = dict.fromkeys(each.root for each in found)
        what = "; ".join(describe_mismatches([each for each in found if each.root == root]) for root in roots)
        raise PartitionIdentityError(what, hint=" ".join(each.fix for each in found))


def _columns(names: Sequence[str]) -> str:
    return f"({', '.join(map(identifier, names))})"


def _mismatch(row: Any) -> PartitionMismatch:
    root_schema, root_name, root_identity, schema, name, announced, logged, index = row
    identity = "FULL"
    if not set(announced) <= set(logged) and index is not None:
        # If the root has FULL, its key in the stream is the primary key. Its owner chose FULL, so the
        # partition needs FULL too.
        identity = {"i": f"USING INDEX {identifier(index)}", "d": "DEFAULT"}.get(root_identity, "FULL")
    return PartitionMismatch(
        TableName(root_schema, root_name),
        TableName(schema, name),
        tuple(announced),
        tuple(logged),
        identity,
        root_identity == "f",
    )


# --- uninterrupted membership -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Membership:
    """The membership of a captured table: its OID, and an identifier of the catalog entries that publish it
    or that are its triggers.
    """

    oid: int | None
    """The OID of the table; None if this was loaded from a store that records only `act`."""
    act: str
    """Identifies the catalog entries. `is_same_act` compares two acts: they are the same if the table was
    captured without interruption between them.
    """


@dataclass(frozen=True, slots=True)
class CapturedTables:
    """The state of the catalog at one time: the tables that the reader selects and that are captured
    (`members`), and the names of all tables by OID.
    """

    members: Mapping[TableName, Membership]
    names: Mapping[int, TableName] = field(default_factory=dict)
    """The current name of each table, by OID. May be empty if no membership to compare has an OID."""

    def current_name(self, before: Membership) -> TableName | None:
        """Return the current name of the table; None if it was dropped, or if `before` has no OID."""
        return None if before.oid is None else self.names.get(before.oid)

    def interruption(
        self,
        name: TableName,
        before: Membership,
        *,
        by_oid: bool = False,
        must_be_captured: bool = True,
        must_exist: bool = False,
    ) -> str | None:
        """Return the reason why changes of a table may be missing since it was captured as `before`; None if
        there is no reason.

        A rename is a reason, since a reader that selects tables by name loses changes; with `by_oid`, a table
        keeps its identity under any name. Without `must_be_captured`, a table may leave the publication
        permanently. Without `must_exist`, it may be dropped. A new table with the name of a dropped one is a
        reason; with `by_oid` and without `must_be_captured`, only if the new table is captured.
        """
        current_name = name if before.oid is None else self.current_name(before)
        now = self.members.get(current_name if by_oid and current_name is not None else name)
        is_same_table = by_oid or now is None or before.oid in (None, now.oid)
        if now is not None and is_same_table and is_same_act(before.act, now.act):
            return None
        if current_name is None:
            if self._is_replaced(
                name, is_captured=now is not None, by_oid=by_oid, must_be_captured=must_be_captured
            ):
                return "was dropped, and another table has its name"
            return "was dropped" if must_exist else None
        if current_name != name and not by_oid:
            return f"is called {current_name} now"
        if now is not None:
            return "was taken out of the publication and put in again"
        return "was taken out of the publication" if must_be_captured else None

    def interruptions(
        self, recorded: Mapping[TableName, Membership], *, by_oid: bool = False, must_be_captured: bool = True
    ) -> dict[TableName, str]:
        """Return the tables in `recorded` whose changes may be missing, with the reason for each."""
        reasons = {
            name: self.interruption(name, before, by_oid=by_oid, must_be_captured=must_be_captured)
            for name, before in recorded.items()
        }
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def _is_replaced(
        self, name: TableName, *, is_captured: bool, by_oid: bool, must_be_captured: bool
    ) -> bool:
        """Whether another table has the name of a dropped one, and its changes may be missing."""
        if by_oid and not must_be_captured:
            return is_captured
        return is_captured or name in self.names.values()


def is_same_act(before: str, now: str) -> bool:
    """Whether two recorded acts show that a table was captured without interruption.

    The act of a table with triggers lists the triggers of its partitions after a `|`. Only triggers in both
    lists are compared, since partitions may be attached and detached. Earlier versions recorded `all` for a
    table that is published through its schema.
    """
    (own, _, parts), (own_now, _, parts_now) = before.partition("|"), now.partition("|")
    publication, _, entry = own.partition("/")
    if own != own_now and not (entry == "all" and own_now.startswith(f"{publication}/schema-")):
        return False
    acts, acts_now = _partition_acts(parts), _partition_acts(parts_now)
    return all(acts[oid] == acts_now[oid] for oid in acts.keys() & acts_now.keys())


def _partition_acts(parts: str) -> dict[str, str]:
    return dict(part.split("/") for part in parts.split(",") if part)


def inspect_memberships(
    connection: Connection, publication: str, tables: Iterable[TableName]
) -> dict[TableName, Membership]:
    """Return the membership of each of `tables` that is published."""
    found = inspect_publication(connection, publication)
    if found is None:
        return {}
    schema_acts: dict[str, int] = {}
    if connection.info.server_version >= SCHEMAS_VERSION:
        rows: list[Any] = connection.execute(
            query("publication", "schemas"), {"publication": found.oid}
        ).fetchall()
        schema_acts = dict(rows)
    memberships = {}
    for relation in inspect_relations(connection, publication, tables):
        if not relation.is_published:
            continue
        schema = relation.name.schema
        act: object = relation.membership or (
            f"schema-{schema_acts[schema]}" if schema in schema_acts else "all"
        )
        memberships[relation.name] = Membership(relation.oid, f"{found.oid}/{act}")
    return memberships


def inspect_captured_tables(
    address: SourceAddress, publication: str, selects: Callable[[TableName], bool], *, old_rows: bool = False
) -> CapturedTables:
    """Inspect the published tables that `selects` accepts, and the names of all tables.

    Reads only the catalog, so a locked table does not block it, unless the table's column list must be
    changed.

    Raises `PartitionIdentityError` if changes of one of the selected tables do not identify their rows; with
    `old_rows`, also if they lack whole old rows.
    """
    with connect(address) as connection:
        tables = inspect_tables(connection)
        selected = [table.name for table in tables if selects(table.name)]
        members = inspect_memberships(connection, publication, selected)
        check_partition_identities(connection, members, publication, old_rows=old_rows)
    return CapturedTables(members, {table.oid: table.name for table in tables})
