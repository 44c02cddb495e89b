"""Locks that only Penstock's own role can take, and the names of the sessions that hold them.

Advisory locks are open to every role that may connect. So a lock that lasts as long as a session is a *lease*: a row of a table that
Penstock owns, which names the session. It is free once that session has ended. A short lock is one on a table that Penstock owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from penstock.errors import LockWaitError, PrivilegeError
from penstock.postgres.connection import Connection
from penstock.postgres.ownership import OwnSchema, OwnTable, Trust
from penstock.postgres.queries import identifier, query
from penstock.schema import TableName

LOCK_SECONDS = 10.0

LEASES = OwnTable("leases", {"name": "text", "pid": "integer", "role": "oid", "started": "timestamp with time zone"}, is_added=True)


class Lease:
    """The lease called `name`, in the schema of Penstock's that has the table `leases`. Taken and released on one connection."""

    def __init__(self, connection: Connection, schema: str, name: str) -> None:
        self._connection = connection
        self._schema = schema
        self._name = name

    def take(self) -> str | None:
        """Take it until the session ends. If another session holds it, gives a description of that session instead of None."""
        with waiting_for(self._connection, [TableName(self._schema, LEASES.name)], f"taking the lease {self._name}"):
            self._execute("lock")
            self._execute("refresh")
            if self._execute("take").fetchone() is not None:
                self._execute("keep_alive")
                return None
            rows: Any = self._execute("holder").fetchall()
            return describe_sessions(rows)

    def ensure_table(self) -> None:
        """Create the table of leases in a schema that an earlier version created."""
        own = OwnSchema(self._schema, (LEASES,))
        found = own.check(self._connection)
        if found is None or not found.missing:
            return
        create = lease_statement("create", self._schema)
        try:
            with suppress(psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation):  # of two sessions that create it, one fails
                self._connection.execute(create)
        except psycopg.errors.InsufficientPrivilege as error:
            role = identifier(Trust.load(self._connection).role)
            grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON {identifier(self._schema, LEASES.name)} TO {role};"
            raise PrivilegeError(
                f"the role may not create the table of leases in schema {self._schema}",
                hint=f"as {identifier(found.owner)}: {' '.join(create.as_string().split())}; {grant}",
            ) from error
        own.check(self._connection)

    def release(self) -> None:
        """Give it back before the session ends: the server takes its time to notice that."""
        with suppress(psycopg.Error):
            self._execute("release")

    def _execute(self, name: LiteralString) -> psycopg.Cursor[tuple[object, ...]]:
        return self._connection.execute(lease_statement(name, self._schema), {"name": self._name})


def lease_statement(name: LiteralString, schema: str) -> sql.Composed:
    return sql.SQL(query("lease", name)).format(schema=sql.Identifier(schema))


@contextmanager
def waiting_for(connection: Connection, tables: Iterable[TableName], doing: str) -> Iterator[None]:
    """A transaction that waits for a lock for some seconds only. `LockWaitError` names the sessions that hold one on `tables`."""
    try:
        with connection.transaction():
            connection.execute(lock_timeout(LOCK_SECONDS))
            yield
    except psycopg.errors.LockNotAvailable as error:
        raise lock_wait(connection, tables, doing) from error


def lock_timeout(seconds: float) -> sql.Composed:
    return sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{seconds * 1000:.0f}ms"))


def lock_wait(connection: Connection, tables: Iterable[TableName], doing: str) -> LockWaitError:
    """The error for a lock that was not granted in time. Not within a transaction that failed."""
    names = [sql.Identifier(table.schema, table.name).as_string(connection) for table in tables]
    rows: Any = connection.execute("SELECT pg_catalog.to_regclass(name)::oid FROM pg_catalog.unnest(%s::text[]) AS t (name)", [names])
    return lock_wait_of(connection, [oid for (oid,) in rows if oid is not None], doing, LOCK_SECONDS)


def lock_wait_of(connection: Connection, oids: Sequence[int], doing: str, seconds: float) -> LockWaitError:
    rows: list[Any] = connection.execute(query("lease", "lock_holders"), {"oids": list(oids)}).fetchall()
    return LockWaitError(
        f"{doing}: {describe_sessions(rows)} has held a lock on a table for more than {seconds:.0f} seconds",
        hint=" ".join(f"SELECT pg_terminate_backend({pid});" for pid, *_ in rows) or None,
    )


def describe_sessions(rows: Sequence[tuple[int, str | None, str | None]]) -> str:
    """Sessions by process, role and application. What they run is not shown."""
    people = [(pid, ", ".join(filter(None, (role and f"role {role}", application)))) for pid, role, application in rows]
    return " and ".join(f"process {pid} ({person})" if person else f"process {pid}" for pid, person in people) or "another session"
