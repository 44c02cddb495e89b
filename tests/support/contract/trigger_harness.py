"""The source of the `TriggerCapture` tests: in one database, each test has its own tables, change table and
spool.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from penstock.capture.settings import CaptureLimits
from penstock.capture.trigger.capture import TriggerCapture
from penstock.capture.trigger.feed import TriggerSettings
from penstock.postgres.connection import SourceAddress
from tests.support.contract.tables_harness import TablesHarness
from tests.support.fix_postgres import Database

_numbers = itertools.count(1)


class TriggerHarness(TablesHarness):
    def __init__(self, database: Database, directory: Path) -> None:
        number = next(_numbers)
        super().__init__(database, f"noted{number}", f"noted_other{number}")
        self.settings = TriggerSettings(
            SourceAddress.parse(database.dsn),
            name=f"capture{number}",
            spool=directory / "trigger-spool",
            limits=CaptureLimits(quiet_seconds=0.1),
            poll_seconds=0.02,
        )

    @override
    def capture(self) -> TriggerCapture:
        return TriggerCapture(self.settings).with_trigger_management({self.table, self.other}, manage=True)

    @property
    def noted(self) -> int:
        """How many changes the change table holds."""
        rows = self.database.query(f"SELECT count(*) FROM {self.settings.name}.changes")
        return int(rows[0][0])


@contextmanager
def trigger_harness(database: Database, directory: Path) -> Iterator[TriggerHarness]:
    harness = TriggerHarness(database, directory)
    harness.await_idle()
    yield harness
    database.execute(f"DROP SCHEMA IF EXISTS {harness.settings.name} CASCADE")
