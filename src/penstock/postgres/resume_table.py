"""The tables in the source in which a polling capture keeps where it goes on: `penstock.polling` and `penstock.polled_tables`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import psycopg

from penstock.errors import PrivilegeError
from penstock.position import Position
from penstock.postgres.connection import Connection
from penstock.postgres.queries import identifier, query

_SCHEMA = "penstock"
_TABLES = 2
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

    @property
    def _is_there(self) -> bool:
        """Raises if there is something in it that must not be used."""
        row = self._inspect()
        if row is None:
            return False
        _, tables, strange, _ = row
        if strange:
            raise PrivilegeError(
                f"schema {_SCHEMA} has what somebody else has put there: {', '.join(strange)}; used, it could run with the rights of "
                "whoever uses it",
                hint="see who did; drop it, and start again; or keep where polling goes on in a file instead",
            )
        return bool(tables == _TABLES)

    def _ensure(self) -> None:
        if self._is_there:
            return
        # Made here, or not at all: what somebody else had made before could run with our rights. Two of us may do so at the same time.
        with _refusing(), suppress(*_MADE), self._connection.transaction():
            row = self._inspect()
            if row is None:
                self._connection.execute(query("polling", "create_resume_schema"))
            elif not row[0]:
                raise PrivilegeError(
                    f"schema {_SCHEMA} belongs to {row[-1]}, who would have tables of this role in his power",
                    hint=f"as {identifier(row[-1])}: {_statements('create_resume')}",
                )
            self._connection.execute(query("polling", "create_resume"))
        if not self._is_there:
            raise PrivilegeError(f"schema {_SCHEMA} has only a part of the tables of a polling capture", hint="drop it, and start again")

    def _inspect(self) -> Any:
        return self._execute("inspect_resume", schema=_SCHEMA).fetchone()

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
