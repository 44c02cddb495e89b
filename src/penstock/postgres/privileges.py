"""What the role that we connect as may do, asked of the catalog, and the grants that would let it do more.

Managed services give their administrators roles of their own instead of superuser; the remedies name those where they exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.postgres.connection import Connection
from penstock.postgres.queries import identifier, query
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class Role:
    """The current user. `services` are the roles that managed services give to their administrators, as far as the server has them."""

    name: str
    database: str
    may_create: bool
    """Whether it may create objects such as publications in the database."""
    is_read_only: bool
    is_on_standby: bool
    services: tuple[str, ...]

    @property
    def identifier(self) -> str:
        return identifier(self.name)

    def replication_grant(self) -> str:
        """What lets the role open a replication connection, in the words of the service that the server seems to be."""
        if "rds_replication" in self.services:
            return f"GRANT rds_replication TO {self.identifier};"
        return f"ALTER ROLE {self.identifier} REPLICATION;"

    def creation_grant(self) -> str:
        return f"GRANT CREATE ON DATABASE {identifier(self.database)} TO {self.identifier};"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A table that the role cannot read whole. More than one reason may hold."""

    table: TableName
    has_usage: bool
    refused_columns: tuple[str, ...]
    row_security: bool


def inspect_role(connection: Connection) -> Role:
    row: Any = connection.execute(query("privileges", "role")).fetchone()
    name, database, may_create, is_read_only, is_on_standby, services = row
    return Role(name, database, may_create, is_read_only, is_on_standby, tuple(services))


def inspect_unreadable(connection: Connection, wanted: Mapping[int, Collection[str]]) -> list[Unreadable]:
    """Of some tables, by OID, each with the columns that are wanted of it: the heaps that the role cannot read. One statement for all."""
    rows: list[Any] = connection.execute(query("privileges", "unreadable"), {"oids": list(wanted)}).fetchall()
    found = []
    for oid, schema, name, has_usage, columns, row_security in rows:
        # Grants on every single column of the table leave out ctid, by which a snapshot reads: it takes a grant on the table.
        refused = tuple(column for column in columns if column == "ctid" or column in wanted[oid])
        if refused or row_security or not has_usage:
            found.append(Unreadable(TableName(schema, name), has_usage, refused, row_security))
    return found


@dataclass(frozen=True, slots=True)
class OwnerCode:
    """Code of others that may run as this role when tables are read."""

    owners: Mapping[int, str]
    """By table, its owner, where that is no superuser and this role is one."""
    functions: Mapping[int, tuple[str, ...]]
    """By table, functions of others that its indexes and constraints call, each with its owner."""


def inspect_owner_code(connection: Connection, oids: Collection[int]) -> OwnerCode:
    """Of some tables, by OID, their partitions included."""
    owners: list[Any] = connection.execute(query("privileges", "foreign_owners"), {"oids": list(oids)}).fetchall()
    functions: dict[int, tuple[str, ...]] = {}
    for oid, function, owner in connection.execute(query("privileges", "foreign_functions"), {"oids": list(oids)}):
        functions[int(str(oid))] = (*functions.get(int(str(oid)), ()), f"{function} of {owner}")
    return OwnerCode(dict(owners), functions)
