"""The source of the `PollingCapture` tests: in one database, each test has its own tables, name and spool."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from penstock.capture.polling.capture import PollingCapture
from penstock.capture.polling.settings import PollingSettings
from penstock.capture.settings import CaptureLimits, PollingRules
from penstock.contracts.capture import Event
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader
from penstock.testing.streams import wait_for
from tests.support.contract.tables_harness import TablesHarness
from tests.support.fix_postgres import Database

_numbers = itertools.count(1)


class PollingHarness(TablesHarness):
    """A commit returns after a poll has seen it, if a stream polls: changes between two polls are captured as
    one transaction.
    """

    orders_changes = False

    def __init__(self, database: Database, directory: Path) -> None:
        number = next(_numbers)
        super().__init__(database, f"polled{number}a", f"polled{number}b")
        self.settings = PollingSettings(
            SourceAddress.parse(database.dsn),
            f"polling_{number}",
            directory / "spool",
            (self.table, self.other),
            PollingRules(interval_seconds=0.02, deletes=True, resume=directory / "resume"),
            CaptureLimits(quiet_seconds=0.05),
        )

    def ruled(self, **rules: object) -> None:
        """Captures created later use these polling rules."""
        self.settings = replace(self.settings, rules=replace(self.settings.rules, **rules))  # type: ignore[arg-type]

    @override
    def capture(self) -> PollingCapture:
        return PollingCapture(self.settings)

    @override
    def commit(self, *events: Event) -> None:
        super().commit(*events)
        self.await_look()

    def await_look(self) -> None:
        """Wait until the stream has seen everything committed so far."""
        (at,) = self.database.query("SELECT pg_current_wal_insert_lsn()::text")[0]
        reader = SpoolReader(self.settings.spool)

        def is_seen() -> bool:
            is_running = any(thread.name == "penstock-capture" for thread in threading.enumerate())
            end = reader.end
            return not is_running or (end is not None and end >= Position.parse(at))

        wait_for(is_seen, f"a look at {at}", lambda: reader.end, self.deadline_seconds)


class CursorHarness(PollingHarness):
    """By a column that a sequence fills, in every insert and update."""

    def __init__(self, database: Database, directory: Path) -> None:
        super().__init__(database, directory)
        self.ruled(cursor="version")

    @override
    def create(self, table: TableName) -> None:
        super().create(table)
        raised = f"{table.schema}.raise_version"
        self.database.execute("CREATE SEQUENCE IF NOT EXISTS public.versions")
        self.database.execute(
            f"CREATE OR REPLACE FUNCTION {raised}() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN NEW.version := nextval('public.versions'); RETURN NEW; END $$"
        )
        self.database.execute(f"ALTER TABLE {table} ADD version bigint NOT NULL")
        self.database.execute(f"CREATE INDEX ON {table} (version)")
        self.database.execute(
            "CREATE TRIGGER raised BEFORE INSERT OR UPDATE "
            f"ON {table} FOR EACH ROW EXECUTE FUNCTION {raised}()"
        )


@contextmanager
def idle(harness: PollingHarness) -> Iterator[PollingHarness]:
    harness.await_idle()
    yield harness
