"""`WalCapture` keeps both of its contracts, on a real server."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from psycopg import sql
from typing_extensions import override

from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.capture.wal import WalCapture
from penstock.contracts.capture import Delete, Event, Truncate, Upsert
from penstock.postgres.connection import SourceAddress
from penstock.testing.capture_conformance import CaptureHarness, ChangeCaptureConformance
from tests.fix_postgres import Database


class WalHarness(CaptureHarness):
    def __init__(self, database: Database, directory: Path) -> None:
        self.database = database
        self.settings = CaptureSettings(
            SourceAddress.parse(database.dsn),
            slot=f"{database.name}_slot",
            publication="conformance",
            spool=directory / "spool",
            limits=CaptureLimits(quiet_seconds=0.1),
        )
        for table in (self.table.name, self.other.name):
            database.execute(f"CREATE TABLE public.{table} (id bigint PRIMARY KEY, note text)")
        database.execute("CREATE TABLE public.elsewhere (note text)")

    @override
    def capture(self) -> WalCapture:
        return WalCapture(self.settings).with_publication_management({self.table, self.other}, manage=True)

    @override
    def commit(self, *events: Event) -> None:
        with self.database.connect() as connection:
            for event in events:
                table = sql.Identifier(event.table.schema, event.table.name)
                match event:
                    case Upsert():
                        statement = "INSERT INTO {} VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET note = excluded.note"
                        connection.execute(sql.SQL(statement).format(table), [event.key["id"], event.row["note"]])
                    case Delete():
                        connection.execute(sql.SQL("DELETE FROM {} WHERE id = %s").format(table), [event.key["id"]])
                    case Truncate():
                        connection.execute(sql.SQL("TRUNCATE {}").format(table))

    @override
    def commit_elsewhere(self) -> None:
        self.database.execute("INSERT INTO public.elsewhere SELECT repeat('x', 1000) FROM generate_series(1, 500)")

    @override
    def open_resources(self) -> object:
        active = self.database.query(
            "SELECT application_name FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()", self.database.name
        )
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-")]
        return sorted(str(row[0]) for row in active), sorted(threads)


class TestWalCapture(ChangeCaptureConformance):
    @pytest.fixture
    def harness(self, database: Database, tmp_path: Path) -> WalHarness:
        return WalHarness(database, tmp_path)
