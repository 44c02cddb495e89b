"""Owner and definition of objects that Penstock finds in a database instead of creating them.

A role that may create objects could make the schema, table or function that Penstock needs before Penstock does, and have its own code run
with the rights of Penstock's role. So an object is used only if its owner is trusted: Penstock's role, a role that can act as it anyway
(a superuser, a member, the administrator that created it), or a role named under `trusted_roles` in the configuration. Tables must have
the expected definition as well, because an owner can let other roles add to it.

Nobody but the owners of a schema and of a table can put another table in its place. So once both are known to be trusted, a name cannot
change its meaning between the check and the use. Writers lock the tables first, so that no trigger is added in between either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import sql

from penstock.errors import UntrustedObjectError
from penstock.postgres.connection import TRUSTED_ROLES, Connection
from penstock.postgres.queries import identifier, query
from penstock.schema import TableName

_DATABASE_OWNER = "pg_database_owner"
_INSPECT = sql.SQL("SELECT * FROM ({}) AS trust LEFT JOIN ({}) AS found ON true").format(
    sql.SQL(query("ownership", "trust")), sql.SQL(query("ownership", "schema"))
)


@dataclass(frozen=True, slots=True)
class Trust:
    """The roles whose objects a session may use."""

    role: str
    database_owner: str
    roles: frozenset[str]
    database_roles: frozenset[str]
    """Roles that can act as the owner of the database."""

    @classmethod
    def load(cls, connection: Connection) -> Trust:
        row: Any = connection.execute(query("ownership", "trust")).fetchone()
        return cls.of(*row)

    @classmethod
    def of(cls, role: str, database_owner: str, roles: Iterable[str], database_roles: Iterable[str]) -> Trust:
        return cls(role, database_owner, frozenset(roles), frozenset(database_roles))

    def covers(self, owner: str) -> bool:
        return (self.database_owner if owner == _DATABASE_OWNER else owner) in self.roles

    def covers_or_owns_database(self, owner: str) -> bool:
        """For objects whose owner gains no rights of ours: publications, and the schemas of a target's tables."""
        return self.covers(owner) or owner == _DATABASE_OWNER or owner in self.database_roles


def remedy(owner: str) -> str:
    """How a person lets objects of a role be used."""
    return f"if you trust role {owner}, add it to {TRUSTED_ROLES}, under source or sink.postgres, in the configuration"


@dataclass(frozen=True, slots=True)
class OwnTable:
    """A table of Penstock's as this version creates it. Types and expressions are written as the server prints them."""

    name: str
    columns: Mapping[str, str]
    added: frozenset[str] = frozenset()
    """Columns that tables of earlier versions lack."""
    is_added: bool = False
    """Whether earlier versions have no such table."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    checks: Sequence[str] = ()

    def differences(self, found: Mapping[str, Any], trust: Trust) -> Iterator[str]:
        """Everything in a table of this name that must not be there, or is missing."""
        if not trust.covers(found["owner"]):
            yield f"table {self.name} of role {found['owner']}"
        if not found["is_plain"]:
            yield f"{self.name}, which is not an ordinary table"
        columns: Mapping[str, Any] = found["columns"] or {}
        for name, wanted in self.columns.items():
            if name not in columns and name not in self.added:
                yield f"table {self.name} without column {name}"
            elif name in columns and columns[name][0] != wanted:
                yield f"column {name} of table {self.name}, which is not of type {wanted}"
        for name, (_, default) in columns.items():
            if name not in self.columns:
                yield f"column {name} of table {self.name}"
            if default != self.defaults.get(name) and name in self.columns and default is not None:
                yield f"default of column {name} of table {self.name}"
        if not set(found["checks"]) <= set(self.checks):
            yield f"check constraint on table {self.name}"
        yield from (f"{other} on table {self.name}" for other in found["others"])


@dataclass(frozen=True, slots=True)
class FoundSchema:
    """A schema of Penstock's, as it was found."""

    owner: str
    is_trusted: bool
    missing: frozenset[str]
    """Tables, functions and columns that this version has and the schema lacks."""
    tables: frozenset[str]
    functions: frozenset[str]
    strange: tuple[str, ...]
    """Every object that must not be used, and the reason."""

    def has(self, *tables: str) -> bool:
        return self.tables.issuperset(tables)


@dataclass(frozen=True, slots=True)
class OwnSchema:
    """A schema of Penstock's with its tables and functions."""

    name: str
    tables: Sequence[OwnTable]
    functions: Sequence[str] = ()

    def inspect(self, connection: Connection) -> FoundSchema | None:
        """Compare the schema with its definition. None if there is no such schema."""
        arguments = {"schema": self.name, "tables": [table.name for table in self.tables], "functions": list(self.functions)}
        row: Any = connection.execute(_INSPECT, arguments).fetchone()
        *facts, owner, tables, functions = row
        trust = Trust.of(*facts)
        if owner is None:
            return None
        known = {table.name: table for table in self.tables}
        strange = [] if trust.covers(owner) else [f"schema {self.name} of role {owner}"]
        strange += [reason for found in tables for reason in known[found["name"]].differences(found, trust)]
        strange += [reason for found in functions for reason in _function_differences(found, trust)]
        names = {found["name"] for found in (*tables, *functions)}
        missing = {*known, *self.functions} - names
        missing |= {name for found in tables for name in known[found["name"]].added if name not in (found["columns"] or {})}
        return FoundSchema(
            owner,
            trust.covers(owner),
            frozenset(missing),
            frozenset(found["name"] for found in tables),
            frozenset(found["name"] for found in functions),
            tuple(strange),
        )

    def check(self, connection: Connection) -> FoundSchema | None:
        """As `inspect`. Raises `UntrustedObjectError` if there is anything that must not be used."""
        found = self.inspect(connection)
        if found is not None and found.strange:
            raise self.refusal(found)
        return found

    def refusal(self, found: FoundSchema) -> UntrustedObjectError:
        trusted = "" if found.is_trusted else f"; or {remedy(found.owner)}"
        return UntrustedObjectError(
            f"schema {self.name} has what somebody else has put there: {', '.join(found.strange)}; used, it could run code with the rights "
            "of Penstock's role",
            hint=f"find out who made it; then DROP SCHEMA {identifier(self.name)} CASCADE; and start again, which creates it{trusted}",
        )

    def lock(self, connection: Connection) -> None:
        """Keep the tables as they are until the end of the transaction, as far as they exist. To be called before `check`."""
        lock_tables(connection, [TableName(self.name, table.name) for table in self.tables])


def lock_tables(connection: Connection, tables: Sequence[TableName]) -> None:
    """Lock tables against being altered, replaced or given triggers, as far as they exist, until the end of the transaction."""
    names = [sql.Identifier(table.schema, table.name) for table in tables]
    texts = sql.SQL(", ").join(sql.Literal(name.as_string(connection)) for name in names)
    body = sql.SQL(query("ownership", "lock")).format(names=texts).as_string(connection)
    # Not between dollar quotes, which a name could end.
    connection.execute(sql.SQL("DO {}").format(sql.Literal(body)))


def check_target_table(connection: Connection, place: TableName) -> None:
    """Raise `UntrustedObjectError` if writing to a table that others made could run code of roles that are not trusted."""
    lock_tables(connection, [place])
    rows: Any = connection.execute(query("ownership", "table"), {"schema": place.schema, "table": place.name}).fetchall()
    trust = Trust.load(connection)
    for what, owner, is_schema in rows:
        is_trusted = trust.covers_or_owns_database(owner) if is_schema else trust.covers(owner)
        if not is_trusted:
            raise UntrustedObjectError(
                f"{place} is not written to: {what} belongs to role {owner}, whose code could run with the rights of Penstock's role",
                hint=f"change its owner, or drop it; or {remedy(owner)}",
            )


def check_target_schema(connection: Connection, schema: str) -> None:
    """Raise `UntrustedObjectError` if a schema of the target could be exchanged, with its tables, by a role that is not trusted."""
    found = OwnSchema(schema, ()).inspect(connection)
    trust = Trust.load(connection)
    if found is not None and not trust.covers_or_owns_database(found.owner):
        raise UntrustedObjectError(
            f"schema {schema} belongs to role {found.owner}, who could put other tables in the place of those that Penstock creates there",
            hint=f"ALTER SCHEMA {identifier(schema)} OWNER TO {identifier(trust.role)}; or {remedy(found.owner)}",
        )


def untrusted_schemas(connection: Connection, schemas: Iterable[str]) -> Iterator[UntrustedObjectError]:
    """What `check_target_schema` would raise for each of some schemas."""
    for schema in sorted(schemas):
        try:
            check_target_schema(connection, schema)
        except UntrustedObjectError as error:
            yield error


def _function_differences(found: Mapping[str, Any], trust: Trust) -> Iterator[str]:
    if not trust.covers(found["owner"]):
        yield f"function {found['name']} of role {found['owner']}"
    if not found["is_pinned"]:
        yield f"function {found['name']} without search_path = pg_catalog, pg_temp"
