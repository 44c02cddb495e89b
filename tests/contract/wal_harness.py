"""The source of the tests of `WalCapture`: in one database, each test has tables, slot, publication and spool of its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from psycopg import sql
from typing_extensions import override

from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.capture.wal import WalCapture
from penstock.contracts.capture import Delete, Event, Truncate, Upsert
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.testing.capture_conformance import CaptureHarness
from penstock.testing.streams import wait_for
from tests.fix_postgres import Database

_numbers = itertools.count(1)


class WalHarness(CaptureHarness):
    def __init__(self, database: Database, directory: Path) -> None:
        number = next(_numbers)
        self.database = database
        self.table = TableName("public", f"t{number}")
        self.other = TableName("public", f"other{number}")
        self.settings = CaptureSettings(
            SourceAddress.parse(database.dsn),
            slot=f"{database.name}_{number}",
            publication=f"p{number}",
            spool=directory / "spool",
            limits=CaptureLimits(quiet_seconds=0.1),
        )
        for table in (self.table, self.other):
            database.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
        database.execute("CREATE TABLE IF NOT EXISTS public.elsewhere (note text)")

    @override
    def capture(self) -> WalCapture:
        return WalCapture(self.settings).with_publication_management({self.table, self.other}, manage=True)

    @override
    def commit(self, *events: Event) -> None:
        commit_events(self.database, events)

    @override
    def commit_elsewhere(self) -> None:
        self.database.execute("INSERT INTO public.elsewhere SELECT repeat('x', 1000) FROM generate_series(1, 500)")

    @override
    def open_resources(self) -> object:
        return open_penstock(self.database)

    @property
    def confirmed(self) -> Position:
        rows = self.database.query("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.settings.slot)
        return Position.parse(rows[0][0])

    @property
    def has_slot(self) -> bool:
        return bool(self.database.query("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", self.settings.slot))

    def drop_slot(self) -> None:
        free = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s AND active"
        wait_for(lambda: self.database.query(free, self.settings.slot) == [(0,)], "a free slot", self.open_resources, self.deadline_seconds)
        self.database.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", self.settings.slot
        )


def commit_events(database: Database, events: Sequence[Event]) -> None:
    """Make these things happen in one transaction, in tables whose first columns are `id` and `note`."""
    with database.connect() as connection:
        for event in events:
            table = sql.Identifier(event.table.schema, event.table.name)
            match event:
                case Upsert():
                    statement = "INSERT INTO {} (id, note) VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET note = excluded.note"
                    connection.execute(sql.SQL(statement).format(table), [event.key["id"], event.row["note"]])
                case Delete():
                    connection.execute(sql.SQL("DELETE FROM {} WHERE id = %s").format(table), [event.key["id"]])
                case Truncate():
                    connection.execute(sql.SQL("TRUNCATE {}").format(table))


def open_penstock(database: Database) -> tuple[list[str], list[str]]:
    """Connections and threads of captures, by name."""
    # Of the capture alone: a backend in which the harness made a change may still be on its way out.
    backends = "SELECT application_name FROM pg_stat_activity WHERE datname = %s AND application_name ~ '^penstock( |$)'"
    # Not those of the suite itself: some of its own tests leave one behind, stuck in a stream that hangs.
    ours = [name for name in (thread.name for thread in threading.enumerate()) if name.startswith("penstock-")]
    threads = [name for name in ours if name != "penstock-conformance"]
    return sorted(str(row[0]) for row in database.query(backends, database.name)), sorted(threads)


@contextmanager
def wal_harness(database: Database, directory: Path) -> Iterator[WalHarness]:
    harness = WalHarness(database, directory)
    # The server takes a moment to be rid of the connections of the test before.
    wait_for(lambda: harness.open_resources() == ([], []), "nothing open", harness.open_resources, harness.deadline_seconds)
    yield harness
    harness.drop_slot()
