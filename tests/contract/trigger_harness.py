"""The source of the tests of `TriggerCapture`: in one database, each test has tables, change table and spool of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from penstock.capture.settings import CaptureLimits
from penstock.capture.trigger import TriggerCapture
from penstock.capture.trigger_settings import TriggerSettings
from penstock.contracts.capture import Event
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.testing.capture_conformance import CaptureHarness
from penstock.testing.streams import wait_for
from tests.contract.wal_harness import commit_events, open_penstock
from tests.fix_postgres import Database

_numbers = itertools.count(1)


class TriggerHarness(CaptureHarness):
    def __init__(self, database: Database, directory: Path) -> None:
        number = next(_numbers)
        self.database = database
        self.table = TableName("public", f"noted{number}")
        self.other = TableName("public", f"noted_other{number}")
        self.settings = TriggerSettings(
            SourceAddress.parse(database.dsn),
            name=f"capture{number}",
            spool=directory / "trigger-spool",
            limits=CaptureLimits(quiet_seconds=0.1),
            poll_seconds=0.02,
        )
        for table in (self.table, self.other):
            database.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
        database.execute("CREATE TABLE IF NOT EXISTS public.elsewhere (note text)")

    @override
    def capture(self) -> TriggerCapture:
        return TriggerCapture(self.settings).with_trigger_management({self.table, self.other}, manage=True)

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
    def noted(self) -> int:
        """How many changes the change table holds."""
        rows = self.database.query(f"SELECT count(*) FROM {self.settings.name}.changes")
        return int(rows[0][0])


@contextmanager
def trigger_harness(database: Database, directory: Path) -> Iterator[TriggerHarness]:
    harness = TriggerHarness(database, directory)
    # The server takes a moment to be rid of the connections of the test before.
    wait_for(lambda: harness.open_resources() == ([], []), "nothing open", harness.open_resources, harness.deadline_seconds)
    yield harness
    database.execute(f"DROP SCHEMA IF EXISTS {harness.settings.name} CASCADE")
