"""The tables in the source in which a polling capture keeps where it goes on: `penstock.polling` and `penstock.polled_tables`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import psycopg

from penstock.errors import PrivilegeError, SlotBusyError
from penstock.position import Position
from penstock.postgres.connection import Connection
from penstock.postgres.lease import Lease
from penstock.postgres.ownership import OwnSchema, OwnTable
from penstock.postgres.queries import query

_SCHEMA = "penstock"
_POLLING = OwnTable(
    "polling",
    {"name": "text", "position": "pg_lsn", "state": "text", "confirmed_at": "timestamp with time zone"},
    defaults={"confirmed_at": "now()"},
)
_POLLED = OwnTable("polled_tables", {"name": "text", "oid": "oid", "state": "text"})
_OWN = OwnSchema(_SCHEMA, (_POLLING, _POLLED))
_MADE = (psycopg.errors.DuplicateSchema, psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation)
_REFUSED = (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction)


class ResumeTable:
    """Of the capture `name`, over one connection."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    def load_mark(self) -> tuple[Position, str] | None:
        row: Any = self._execute("load_resume").fetchone() if self._is_there else None
        return None if row is None else (Position.parse(row[0]), row[1])

    def begin_mark(self, position: Position, state: str) -> None:
        self._ensure()
        self._execute("begin_resume", position=str(position), state=state)

    def save_mark(self, position: Position, state: str) -> None:
        self._ensure()
        self._execute("save_resume", position=str(position), state=state)

    def load_tables(self) -> dict[int, str]:
        rows: Any = self._execute("load_polled").fetchall() if self._is_there else []
        return dict(rows)

    def save_tables(self, tables: Mapping[int, str]) -> None:
        self._ensure()
        with self._connection.transaction():
            for oid, state in tables.items():
                self._execute("save_polled", oid=oid, state=state)

    def remove_tables(self, oids: Collection[int]) -> None:
        self._execute("remove_polled", oids=list(oids))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the only capture that polls under this name, for the length of the block. `SlotBusyError` if there is one already."""
        self._ensure()
        lease = Lease(self._connection, _SCHEMA, f"polling/{self._name}")
        lease.ensure_table()
        holder = lease.take()
        if holder is not None:
            raise SlotBusyError(f"another process polls under the name {self._name}: {holder}")
        try:
            yield
        finally:
            lease.release()

    @property
    def _is_there(self) -> bool:
        """Raises `UntrustedObjectError` if the tables must not be used."""
        found = _OWN.check(self._connection)
        return found is not None and not found.missing

    def _ensure(self) -> None:
        if self._is_there:
            return
        # Checked again after that: another role may have created the schema in between. Two captures may create the tables at once.
        with _refusing(), suppress(*_MADE), self._connection.transaction():
            if _OWN.check(self._connection) is None:
                self._connection.execute(query("polling", "create_resume_schema"))
            self._connection.execute(query("polling", "create_resume"))
        if not self._is_there:
            raise PrivilegeError(f"schema {_SCHEMA} has only a part of the tables of a polling capture", hint="drop it, and start again")

    def _execute(self, statement: str, **arguments: object) -> psycopg.Cursor[tuple[object, ...]]:
        with _refusing():
            return self._connection.execute(query("polling", statement), {"name": self._name, **arguments})


def _statements(name: LiteralString) -> str:
    return " ".join(query("polling", name).split())


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except _REFUSED as error:
        statements = f"{_statements('create_resume_schema')} {_statements('create_resume')}"
        raise PrivilegeError(
            "the role may not make or use the tables in which polling keeps where it goes on",
            hint=f"have them made: {statements} GRANT USAGE ON SCHEMA penstock TO …; "
            "GRANT SELECT, INSERT, UPDATE, DELETE ON penstock.polling, penstock.polled_tables TO …; or keep it in a file instead",
        ) from error
