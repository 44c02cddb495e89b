"""Owner and definition of database objects that Penstock uses, and locks that only Penstock's role can take.

A role that may create objects could create the schema, table or function that Penstock needs before Penstock
does, and so run its own code with the rights of Penstock's role. So an object is used only if its owner is
trusted: Penstock's role, a role that can act as it anyway (a superuser, a member, the administrator that
created it), or a role named under `trusted_roles` in the configuration. Tables must also have the expected
definition, because an owner can let other roles add to it.

Only the owner of a table, or of its schema, can replace the table by another one. So once both owners are
known to be trusted, a name cannot change its meaning between the check and the use. Writers lock the tables
before the check, so that no trigger can be added between the check and the write.

Advisory locks are not used, since every role that may connect can take them. A lock that lasts as long as a
session is a *lease*: a row that names the session, in a table that Penstock owns. The lease is free once that
session has ended. For a shorter lock, a table that Penstock owns is locked until the end of the transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from penstock.errors import LockWaitError, PrivilegeError, UntrustedObjectError
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
        """Whether the owner is trusted, or can act as the owner of the database. This is used for objects
        through which their owner cannot use the rights of Penstock's role: publications, and the schemas of a
        target's tables.
        """
        return self.covers(owner) or owner == _DATABASE_OWNER or owner in self.database_roles


def remedy(owner: str) -> str:
    """Return the part of a hint that says how to allow the use of a role's objects."""
    return (
        f"if you trust role {owner}, add it to {TRUSTED_ROLES}, under source or sink.postgres, in the "
        "configuration"
    )


@dataclass(frozen=True, slots=True)
class OwnTable:
    """The definition of one of Penstock's tables in this version. Types and expressions are written as the
    server prints them.
    """

    name: str
    columns: Mapping[str, str]
    added: frozenset[str] = frozenset()
    """Columns that the table may lack if an earlier version created it."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    checks: Sequence[str] = ()

    def differences(self, found: Mapping[str, Any], trust: Trust) -> Iterator[str]:
        """Describe everything in the existing table `found` that must not exist, and everything that is
        missing.
        """
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
    """The state of one of Penstock's schemas in the database."""

    owner: str
    is_trusted: bool
    missing: frozenset[str]
    """Names of tables, functions and columns that this version defines and the schema lacks."""
    tables: frozenset[str]
    functions: frozenset[str]
    strange: tuple[str, ...]
    """A description of each object that must not be used, with the reason."""

    def has(self, *tables: str) -> bool:
        return self.tables.issuperset(tables)


@dataclass(frozen=True, slots=True)
class OwnSchema:
    """The definition of one of Penstock's schemas, with its tables and functions."""

    name: str
    tables: Sequence[OwnTable]
    functions: Sequence[str] = ()

    def inspect(self, connection: Connection) -> FoundSchema | None:
        """Compare the schema with its definition. Returns None if there is no such schema."""
        arguments = {
            "schema": self.name,
            "tables": [table.name for table in self.tables],
            "functions": list(self.functions),
        }
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
        missing |= {
            name
            for found in tables
            for name in known[found["name"]].added
            if name not in (found["columns"] or {})
        }
        return FoundSchema(
            owner,
            trust.covers(owner),
            frozenset(missing),
            frozenset(found["name"] for found in tables),
            frozenset(found["name"] for found in functions),
            tuple(strange),
        )

    def check(self, connection: Connection) -> FoundSchema | None:
        """Inspect the schema as `inspect` does. Raises `UntrustedObjectError` if an object in it must not be
        used.
        """
        found = self.inspect(connection)
        if found is not None and found.strange:
            raise self.refusal(found)
        return found

    def refusal(self, found: FoundSchema) -> UntrustedObjectError:
        trusted = "" if found.is_trusted else f"; or {remedy(found.owner)}"
        return UntrustedObjectError(
            f"schema {self.name} contains objects that others created: {', '.join(found.strange)}. "
            "Using them could run code with the rights of Penstock's role",
            hint=f"find out who created them; then DROP SCHEMA {identifier(self.name)} CASCADE; "
            f"and start Penstock again, which creates the schema{trusted}",
        )

    def lock(self, connection: Connection) -> None:
        """Lock the existing tables against changes until the end of the transaction.

        Call it before `check`.
        """
        lock_tables(connection, [TableName(self.name, table.name) for table in self.tables])


def lock_tables(connection: Connection, tables: Sequence[TableName]) -> None:
    """Lock the existing tables against being altered, replaced or given triggers, until the end of the
    transaction.
    """
    names = [sql.Identifier(table.schema, table.name) for table in tables]
    texts = sql.SQL(", ").join(sql.Literal(name.as_string(connection)) for name in names)
    body = sql.SQL(query("ownership", "lock")).format(names=texts).as_string(connection)
    # The body is a literal, since a table name could close dollar quotes.
    connection.execute(sql.SQL("DO {}").format(sql.Literal(body)))


def check_target_table(connection: Connection, place: TableName) -> None:
    """Raise `UntrustedObjectError` if writing to this table could run code of roles that are not trusted."""
    lock_tables(connection, [place])
    rows: Any = connection.execute(
        query("ownership", "table"), {"schema": place.schema, "table": place.name}
    ).fetchall()
    trust = Trust.load(connection)
    for what, owner, is_schema in rows:
        is_trusted = trust.covers_or_owns_database(owner) if is_schema else trust.covers(owner)
        if not is_trusted:
            raise UntrustedObjectError(
                f"{place} is not written to: {what} belongs to role {owner}, whose code could run with the "
                "rights of Penstock's role",
                hint=f"change its owner, or drop it; or {remedy(owner)}",
            )


def check_target_schema(connection: Connection, schema: str) -> None:
    """Raise `UntrustedObjectError` if a role that is not trusted owns this schema of the target, and so could
    replace the tables in it.
    """
    found = OwnSchema(schema, ()).inspect(connection)
    trust = Trust.load(connection)
    if found is not None and not trust.covers_or_owns_database(found.owner):
        raise UntrustedObjectError(
            f"schema {schema} belongs to role {found.owner}, who could replace the tables that Penstock "
            "creates there",
            hint=f"ALTER SCHEMA {identifier(schema)} OWNER TO {identifier(trust.role)}; "
            f"or {remedy(found.owner)}",
        )


def untrusted_schemas(connection: Connection, schemas: Iterable[str]) -> Iterator[UntrustedObjectError]:
    """Yield the errors that `check_target_schema` would raise for these schemas."""
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


LOCK_SECONDS = 10.0

LEASES = OwnTable(
    "leases", {"name": "text", "pid": "integer", "role": "oid", "started": "timestamp with time zone"}
)


class Lease:
    """The lease called `name`, a row in the table `leases` of one of Penstock's schemas. Taken and released
    on one connection.
    """

    def __init__(self, connection: Connection, schema: str, name: str) -> None:
        self._connection = connection
        self._schema = schema
        self._name = name

    def take(self) -> str | None:
        """Take the lease until the session ends.

        Returns None if it succeeded, otherwise a description of the session that holds the lease.
        """
        with waiting_for(
            self._connection, [TableName(self._schema, LEASES.name)], f"taking the lease {self._name}"
        ):
            self._execute("lock")
            self._execute("refresh")
            if self._execute("take").fetchone() is not None:
                self._execute("keep_alive")
                return None
            rows: Any = self._execute("holder").fetchall()
            return describe_sessions(rows)

    def ensure_table(self) -> None:
        """Create the table `leases` if the schema lacks it because an earlier version created the schema."""
        own = OwnSchema(self._schema, (LEASES,))
        found = own.check(self._connection)
        if found is None or not found.missing:
            return
        create = lease_statement("create", self._schema)
        try:
            with suppress(
                psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation
            ):  # if two sessions create it at once, one fails
                self._connection.execute(create)
        except psycopg.errors.InsufficientPrivilege as error:
            role = identifier(Trust.load(self._connection).role)
            grant = (
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON {identifier(self._schema, LEASES.name)} TO {role};"
            )
            raise PrivilegeError(
                f"the role may not create the table of leases in schema {self._schema}",
                hint=f"as {identifier(found.owner)}: {' '.join(create.as_string().split())}; {grant}",
            ) from error
        own.check(self._connection)

    def release(self) -> None:
        """Release the lease explicitly, since the server may notice the end of the session late."""
        with suppress(psycopg.Error):
            self._execute("release")

    def _execute(self, name: LiteralString) -> psycopg.Cursor[tuple[object, ...]]:
        return self._connection.execute(lease_statement(name, self._schema), {"name": self._name})


def lease_statement(name: LiteralString, schema: str) -> sql.Composed:
    return sql.SQL(query("lease", name)).format(schema=sql.Identifier(schema))


@contextmanager
def waiting_for(connection: Connection, tables: Iterable[TableName], doing: str) -> Iterator[None]:
    """Context manager for a transaction whose statements wait at most `LOCK_SECONDS` for a lock. After that
    time it raises a `LockWaitError` that names the sessions that hold a lock on `tables`.
    """
    try:
        with connection.transaction():
            connection.execute(lock_timeout(LOCK_SECONDS))
            yield
    except psycopg.errors.LockNotAvailable as error:
        raise lock_wait(connection, tables, doing) from error


def lock_timeout(seconds: float) -> sql.Composed:
    return sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{seconds * 1000:.0f}ms"))


def lock_wait(connection: Connection, tables: Iterable[TableName], doing: str) -> LockWaitError:
    """Return the error for a lock that was not granted in time. This queries the server, so it must not be
    called within a failed transaction.
    """
    names = [sql.Identifier(table.schema, table.name).as_string(connection) for table in tables]
    rows: Any = connection.execute(
        "SELECT pg_catalog.to_regclass(name)::oid FROM pg_catalog.unnest(%s::text[]) AS t (name)", [names]
    )
    return lock_wait_of(connection, [oid for (oid,) in rows if oid is not None], doing, LOCK_SECONDS)


def lock_wait_of(connection: Connection, oids: Sequence[int], doing: str, seconds: float) -> LockWaitError:
    rows: list[Any] = connection.execute(query("lease", "lock_holders"), {"oids": list(oids)}).fetchall()
    return LockWaitError(
        f"{doing}: {describe_sessions(rows)} has held a lock on a table for more than {seconds:.0f} seconds",
        hint=" ".join(f"SELECT pg_terminate_backend({pid});" for pid, *_ in rows) or None,
    )


def describe_sessions(rows: Sequence[tuple[int, str | None, str | None]]) -> str:
    """Describe sessions by process, role and application, without their queries."""
    people = [
        (pid, ", ".join(filter(None, (role and f"role {role}", application))))
        for pid, role, application in rows
    ]
    return (
        " and ".join(f"process {pid} ({person})" if person else f"process {pid}" for pid, person in people)
        or "another session"
    )
