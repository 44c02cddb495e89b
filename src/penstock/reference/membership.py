"""Whether a reference table has been in the publication all the while, and is still the table that it was.

The server decides by its catalog, as of each change, what is published. A table that was taken out and put in again looks as before, and so
does another one that was given its name; changes in between are in no log. So a checkpoint says which table it was, and which act put it
in.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contracts.connector import SourceCheckpoint
from penstock.errors import CheckpointError, NoTablesError, TableGapError
from penstock.postgres.catalog import check_mirrorable, inspect_key_faults, inspect_schema, inspect_tables
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.outline import lock_patience
from penstock.postgres.partition_identity import check_partition_identities
from penstock.postgres.publication import inspect_memberships
from penstock.postgres.timeline import identify_system
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableName, TableSchema

_LOCK_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Membership:
    """A table in the publication. `act` stays the same for as long as it has been there without a break."""

    system: str
    oid: int
    act: str

    @classmethod
    def of(cls, checkpoint: SourceCheckpoint) -> Membership:
        try:
            metadata = checkpoint.metadata
            return cls(metadata["system"], int(metadata["oid"]), metadata["membership"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                "the checkpoint does not say which table it is of", hint="start without a checkpoint, which copies the table anew"
            ) from error

    def to_metadata(self) -> dict[str, str]:
        return {"system": self.system, "oid": str(self.oid), "membership": self.act}

    def check(self, before: Membership, table: TableName) -> None:
        """Raise if changes may be missing since the table was a member as it was `before`."""
        if self != before:
            what = "another table has its name" if self.oid != before.oid else "it was taken out of the publication"
            raise TableGapError(
                f"changes of the reference table {table} may be missing: {what}",
                hint="start without a checkpoint, which copies the table anew",
            )


def inspect_member(address: SourceAddress, publication: str, table: TableName) -> Membership:
    """As it is now. `LockWaitError` if somebody has the table to himself."""
    system = identify_system(address).identifier
    with connect(address) as connection:
        connection.execute(lock_patience(_LOCK_SECONDS))
        oid = next((each.oid for each in inspect_tables(connection) if each.name == table), 0)
        check_partition_identities(connection, [table])
        return Membership(system, oid, inspect_memberships(connection, publication, [table]).get(table, ""))


def inspect_shape(address: SourceAddress, table: TableName, types: TypePolicy, publication: str | None) -> TableSchema:
    """The table as it is now, if it can be a reference table: its rows must have a key."""
    with connect(address) as connection:
        found = next((each for each in inspect_tables(connection) if each.name == table), None)
        if found is None:
            raise NoTablesError(
                f"there is no table {table} in {address.describe()} that can be captured", hint="check the name; case counts"
            )
        schema = inspect_schema(connection, found, types, publication)
        faults = inspect_key_faults(connection, [schema])
    check_mirrorable(schema, faults.get(table))
    return schema
