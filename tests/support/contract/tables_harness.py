"""Base of the test sources of all captures: in one database, each test has two tables."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from psycopg import sql
from typing_extensions import override

from penstock.contracts.capture import Delete, Event, Truncate, Upsert
from penstock.schema import TableName
from penstock.testing.capture_conformance import CaptureHarness
from penstock.testing.streams import wait_for
from tests.support.fix_postgres import Database


class TablesHarness(CaptureHarness):
    """Subclasses implement `capture`."""

    def __init__(self, database: Database, table: str, other: str) -> None:
        self.database = database
        self.table = TableName("public", table)
        self.other = TableName("public", other)
        for each in (self.table, self.other):
            self.create(each)
        database.execute("CREATE TABLE IF NOT EXISTS public.elsewhere (note text)")

    def create(self, table: TableName) -> None:
        self.database.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")

    @override
    def commit(self, *events: Event) -> None:
        commit_events(self.database, events)

    @override
    def commit_elsewhere(self) -> None:
        self.database.execute(
            "INSERT INTO public.elsewhere SELECT repeat('x', 1000) FROM generate_series(1, 500)"
        )

    @override
    def open_resources(self) -> object:
        return open_penstock(self.database)

    def await_idle(self) -> None:
        """The server needs a moment to close the connections of the previous test."""
        wait_for(
            lambda: self.open_resources() == ([], []),
            "nothing open",
            self.open_resources,
            self.deadline_seconds,
        )


def commit_events(database: Database, events: Sequence[Event]) -> None:
    """Apply these events in one transaction, to tables whose first columns are `id` and `note`."""
    with database.connect() as connection:
        for event in events:
            table = sql.Identifier(event.table.schema, event.table.name)
            match event:
                case Upsert():
                    statement = (
                        "INSERT INTO {} (id, note) VALUES (%s, %s) ON CONFLICT (id) DO UPDATE "
                        "SET note = excluded.note"
                    )
                    connection.execute(sql.SQL(statement).format(table), [event.key["id"], event.row["note"]])
                case Delete():
                    connection.execute(
                        sql.SQL("DELETE FROM {} WHERE id = %s").format(table), [event.key["id"]]
                    )
                case Truncate():
                    connection.execute(sql.SQL("TRUNCATE {}").format(table))


@contextmanager
def shut(database: Database) -> Iterator[None]:
    """Refuse new connections. Open ones stay."""
    # ALTER DATABASE refuses that for the current database
    allow = "UPDATE pg_database SET datallowconn = %s WHERE datname = %s"
    database.execute(allow, False, database.name)
    try:
        yield
    finally:
        database.execute(allow, True, database.name)


def end_connections(database: Database) -> None:
    """The connections of captures, at least one."""
    ours = "datname = %s AND application_name ~ '^penstock( |$)'"
    ended = database.query(
        f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {ours}", database.name
    )
    assert (True,) in ended  # others may have ended by themselves


def open_penstock(database: Database) -> tuple[list[str], list[str]]:
    """Connections and threads of captures, by name."""
    # Of the capture alone: a backend in which the harness made a change may still be on its way out.
    backends = (
        "SELECT application_name FROM pg_stat_activity "
        "WHERE datname = %s AND application_name ~ '^penstock( |$)'"
    )
    # Excludes threads of the suite: some of its tests leave one behind that waits for a hanging stream.
    ours = [
        name for name in (thread.name for thread in threading.enumerate()) if name.startswith("penstock-")
    ]
    threads = [name for name in ours if name != "penstock-conformance"]
    return sorted(str(row[0]) for row in database.query(backends, database.name)), sorted(threads)
