"""The tables in the source in which a polling capture keeps where it goes on: `penstock.polling` and `penstock.polled_tables`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg

from penstock.errors import PrivilegeError
from penstock.position import Position
from penstock.postgres.connection import Connection
from penstock.postgres.queries import query

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
        row: Any = self._execute("has_resume").fetchone()
        return bool(row[0])

    def _ensure(self) -> None:
        if not self._is_there:
            with _refusing():
                self._connection.execute(query("polling", "create_resume"))

    def _execute(self, statement: str, **arguments: object) -> psycopg.Cursor[tuple[object, ...]]:
        with _refusing():
            return self._connection.execute(query("polling", statement), {"name": self._name, **arguments})


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except _REFUSED as error:
        statements = " ".join(query("polling", "create_resume").split())
        raise PrivilegeError(
            "the role may not make or use the tables in which polling keeps where it goes on",
            hint=f"have them made: {statements} GRANT USAGE ON SCHEMA penstock TO …; "
            "GRANT SELECT, INSERT, UPDATE, DELETE ON penstock.polling, penstock.polled_tables TO …; or keep it in a file instead",
        ) from error
