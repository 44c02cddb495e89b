"""What becomes of tables in a publication: whether they have been in it all the while, and are still the tables that they were.

The server decides by its catalog, as of each change, what is published. A table that was taken out and put in again looks as before, and so
does another one that was given its name; changes in between are in no log. So whoever follows tables over restarts keeps, of each, which
act put it in, and which table that was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.postgres.catalog import inspect_tables
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.outline import lock_patience
from penstock.postgres.partition_identity import check_partition_identities
from penstock.postgres.publication import inspect_memberships
from penstock.schema import TableName

_LOCK_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Member:
    """A table in the publication. `act` stays the same for as long as it has been there without a break."""

    oid: int
    act: str


@dataclass(frozen=True, slots=True)
class MemberCatalog:
    """What there is now: every table by its OID, and those of interest that are published."""

    names: Mapping[int, TableName]
    members: Mapping[TableName, Member]

    def gap(self, name: TableName, before: Member, *, must_be_published: bool) -> str | None:
        """What happened to a table, in words; None if nothing that matters did. One that was dropped leaves nothing to be equal to."""
        now, called = self.members.get(name), self.names.get(before.oid)
        if now == before:
            return None
        if called is not None and called != name:
            return f"is called {called} by now"
        if called is None:
            return "was dropped, and another one has its name" if name in self.names.values() else None
        if now is not None:
            return "was taken out of the publication and put in again"
        return "was taken out of the publication" if must_be_published else None

    def hole(self, name: TableName, before: Member, *, must_be_published: bool) -> str | None:
        """The same for one who takes whatever the publication gives. There a table is what it is under any name, and another one of its
        name is as good as long as it was published from its beginning, as by its schema."""
        called = self.names.get(before.oid)
        now = self.members.get(name if called is None else called)
        if now is not None and now.act == before.act:
            return None
        if called is None:
            is_replaced = now is not None or (must_be_published and name in self.names.values())
            return "was dropped, and another one has its name" if is_replaced else None
        if now is not None:
            return "was taken out of the publication and put in again"
        return "was taken out of the publication" if must_be_published else None


def inspect_members(
    address: SourceAddress, publication: str, selects: Callable[[TableName], bool], *, old_rows: bool = False
) -> MemberCatalog:
    """As it is now. `LockWaitError` if another session holds a lock on a table.

    `PartitionIdentityError` if changes of a member do not identify their rows; with `old_rows`, whole old rows are expected.
    """
    with connect(address) as connection:
        connection.execute(lock_patience(_LOCK_SECONDS))
        tables = inspect_tables(connection)
        chosen = {table.name: table.oid for table in tables if selects(table.name)}
        acts = inspect_memberships(connection, publication, chosen)
        check_partition_identities(connection, acts, old_rows=old_rows)
    return MemberCatalog({table.oid: table.name for table in tables}, {name: Member(chosen[name], act) for name, act in acts.items()})
