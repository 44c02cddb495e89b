"""`TriggerCapture`: the contracts of a capture, for Postgres, by triggers and a change table, for servers without logical replication.

A view of the one engine: a `FeedCapture` takes what triggers wrote down into the spool, and the live stream reads it there. The change
table stands in the source, in a schema of its own, and is what a replication slot is to the log: it keeps what is not confirmed, and knows
how far that is. The spool may be lost at any time.

What it costs, and what it does not see: every change is written a second time, by whoever makes it, in his own transaction. Rows that go
without a statement on their table are not seen, as with the log: a partition that is detached or dropped, a table that is dropped. Nor is a
truncate of a single partition. `docs/guides/capture-by-triggers.md` has the whole list.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace

from typing_extensions import override

from penstock.capture import trigger_provision as provision
from penstock.capture.blockers import gap_text
from penstock.capture.feeding import FeedCapture
from penstock.capture.live import LiveChanges, register
from penstock.capture.snapshot import snapshot_changes
from penstock.capture.trigger_feed import TriggerFeed
from penstock.capture.trigger_settings import TriggerSettings
from penstock.contracts.capture import ChangeCapture, ChangeStream
from penstock.contracts.provisioning import CaptureProvisioning, CoverageReport
from penstock.postgres.capture_triggers import has_change_table
from penstock.postgres.change_table import ChangeTable, export_fence
from penstock.postgres.connection import connect
from penstock.postgres.exported import ExportedSnapshot
from penstock.postgres.moments import export_moment
from penstock.schema import TableName

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TriggerCapture(ChangeCapture, CaptureProvisioning):
    """Captures the tables that have its triggers. One `live` stream at a time reads a change table; a second one waits for the first.

    `with_trigger_management` says which tables those must be, and whether the capture may set them up. From the moment a table has its
    triggers, all that commits is kept until it is confirmed, whether anybody reads it or not: take them away, by
    `penstock.postgres.capture_triggers.remove`, when the capture is not needed any more.
    """

    settings: TriggerSettings
    required: frozenset[TableName] = frozenset()
    manage: bool = False

    def with_trigger_management(self, required: AbstractSet[TableName], manage: bool) -> TriggerCapture:
        """The same capture, of which `live` sees to it that the tables `required` have triggers.

        With `manage` it makes the change table and the triggers, where the role may. Otherwise, what is missing is logged as a warning with
        the SQL to run, and the stream goes on without it.
        """
        return replace(self, required=frozenset(required), manage=manage)

    # --- ChangeCapture --------------------------------------------------------------------------------------------------

    @override
    def live(self) -> ChangeStream:
        """Make what is missing, then follow the change table.

        Raises at once what stands in the way before the stream exists. `next` raises what stops the stream later: a change table that is
        gone, or was filled by another server. Its `close` may be called from any thread and ends a `next` that waits. A value that cannot
        be had ends the stream as it does that of a `WalCapture`.
        """
        settings = self.settings
        self._ensure_coverage()
        with connect(settings.address) as connection:
            provision.check_usable(connection, settings.name)
            ChangeTable(connection, settings.name).inspect()
        register(settings.spool)
        capture = FeedCapture(TriggerFeed(settings), settings.feed)
        return LiveChanges(settings.spool, capture, refuse_inexact=settings.types.refuses_inexact)

    @override
    def snapshot(self, tables: Sequence[TableName]) -> ChangeStream:
        """Under one snapshot, in one connection at a time. It waits for nobody's transaction.

        The connection of the snapshot stays open until the stream ends, and with it the server keeps dead rows: read it through, or
        close it.
        """
        settings = self.settings
        return snapshot_changes(settings.address, tables, _exported(settings), settings.types)

    @override
    def lag(self) -> int | None:
        """Bytes of the server's log between the resume point and where it is now; None until the change table exists."""
        with connect(self.settings.address) as connection:
            if not has_change_table(connection, self.settings.name):
                return None
            state = ChangeTable(connection, self.settings.name).inspect()
            return max(0, state.server - state.confirmed)

    # --- CaptureProvisioning --------------------------------------------------------------------------------------------

    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        return provision.inspect_coverage(self.settings.address, self.settings.name, required)

    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        return provision.ensure_coverage(self.settings.address, self.settings.name, required, manage)

    def _ensure_coverage(self) -> None:
        report = self.ensure_coverage(self.required, self.manage)
        if report.satisfied or (self.manage and report.manageable):
            return
        _log.warning(
            "triggers do not cover every required table; %s",
            gap_text(report),
            extra={"schema": self.settings.name, "missing": sorted(map(str, report.missing))},
        )


@contextmanager
def _exported(settings: TriggerSettings) -> Iterator[ExportedSnapshot]:
    """A snapshot, and where it is exact: by the change table, or, as long as there is none, by a moment before all that it will hold."""
    with connect(settings.address) as connection:
        is_there = has_change_table(connection, settings.name)
    with export_fence(settings.address, settings.name) if is_there else export_moment(settings.address) as exported:
        yield exported
