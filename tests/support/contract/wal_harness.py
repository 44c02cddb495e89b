"""The source of the `WalCapture` tests: in one database, each test has its own tables, slot, publication and
spool.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.capture.wal import WalCapture
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.testing.streams import wait_for
from tests.support.contract.tables_harness import TablesHarness
from tests.support.fix_postgres import Database

_numbers = itertools.count(1)


class WalHarness(TablesHarness):
    def __init__(self, database: Database, directory: Path) -> None:
        number = next(_numbers)
        super().__init__(database, f"t{number}", f"other{number}")
        self.settings = CaptureSettings(
            SourceAddress.parse(database.dsn),
            slot=f"{database.name}_{number}",
            publication=f"p{number}",
            spool=directory / "spool",
            limits=CaptureLimits(quiet_seconds=0.1),
        )

    @override
    def capture(self) -> WalCapture:
        return WalCapture(self.settings).with_publication_management({self.table, self.other}, manage=True)

    @property
    def confirmed(self) -> Position:
        rows = self.database.query(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
            self.settings.slot,
        )
        return Position.parse(rows[0][0])

    @property
    def has_slot(self) -> bool:
        return bool(
            self.database.query("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", self.settings.slot)
        )

    def await_free_slot(self) -> None:
        """Wait until no reader has the slot. A closed stream may still have it for a moment."""
        free = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s AND active"
        wait_for(
            lambda: self.database.query(free, self.settings.slot) == [(0,)],
            "a free slot",
            self.open_resources,
            self.deadline_seconds,
        )

    def drop_slot(self) -> None:
        self.await_free_slot()
        self.database.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
            self.settings.slot,
        )


@contextmanager
def wal_harness(database: Database, directory: Path) -> Iterator[WalHarness]:
    harness = WalHarness(database, directory)
    harness.await_idle()
    yield harness
    harness.drop_slot()
