"""What the role that we connect as may do, asked of the catalog, and the grants that would let it do more.

Managed services give their administrators roles of their own instead of superuser; the remedies name those where they exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import PrivilegeError
from penstock.postgres.connection import Connection
from penstock.postgres.queries import identifier, query
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class Role:
    """The current user. `services` are the roles of managed services that the server has, `memberships` those that this role has."""

    name: str
    is_superuser: bool
    has_replication: bool
    bypasses_rls: bool
    database: str
    may_create: bool
    """Whether it may create objects such as publications in the database."""
    is_read_only: bool
    is_on_standby: bool
    services: tuple[str, ...]
    memberships: tuple[str, ...]

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
    has_select: bool
    refused_columns: tuple[str, ...]
    row_security: bool

    def errors(self, role: Role) -> Iterator[PrivilegeError]:
        """What is wrong, each with the statement that mends it."""
        table, schema = identifier(self.table.schema, self.table.name), identifier(self.table.schema)
        if not self.has_usage:
            hint = f"GRANT USAGE ON SCHEMA {schema} TO {role.identifier};"
            yield PrivilegeError(f"role {role.name} may not use schema {self.table.schema}", hint=hint)
        if not self.has_select and self.refused_columns:
            hint = f"GRANT SELECT ON {table} TO {role.identifier};"
            columns = ", ".join(self.refused_columns)
            yield PrivilegeError(f"role {role.name} may not read table {self.table} (columns {columns})", hint=hint)
        if self.row_security:
            hint = f"ALTER ROLE {role.identifier} BYPASSRLS;"
            yield PrivilegeError(f"policies hide rows of table {self.table} from role {role.name}", hint=hint)


def inspect_role(connection: Connection) -> Role:
    row: Any = connection.execute(query("privileges", "role")).fetchone()
    name, superuser, replication, bypasses, database, creates, read_only, standby, services, memberships = row
    return Role(name, superuser, replication, bypasses, database, creates, read_only, standby, tuple(services), tuple(memberships))


def inspect_unreadable(connection: Connection, oids: Collection[int]) -> list[Unreadable]:
    """Those of the tables that the role cannot read whole; one statement however many there are."""
    rows: list[Any] = connection.execute(query("privileges", "unreadable"), {"oids": list(oids)}).fetchall()
    return [
        Unreadable(TableName(schema, name), usage, select, tuple(columns), rls)
        for schema, name, usage, select, columns, rls in rows
        if not usage or rls or (not select and columns)  # a grant on every single column is as good as one on the table
    ]
