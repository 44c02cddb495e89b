"""`TriggerCapture`: the capture contract for Postgres by triggers and a change table, for servers without
logical replication. A capture thread moves recorded changes into the spool, and the live stream reads them
there. The change table is in a separate schema of the source, and has the role of a replication slot: it
keeps unconfirmed changes and stores the confirmed position. So the spool may be lost at any time.

The source writes every change a second time, in the transaction that makes the change. As with the WAL, rows
that disappear without a statement on their table are not captured: when a partition is detached or dropped,
or when a table is dropped. A truncate of a single partition is not captured either. See
`docs/guides/capture-by-triggers.md` for the complete list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace

from typing_extensions import override

from penstock.capture.change_stream import LiveChanges, register
from penstock.capture.events import snapshot_changes
from penstock.capture.pull import FeedCapture
from penstock.capture.source_checks import ensure_or_warn
from penstock.capture.trigger import provision
from penstock.capture.trigger.feed import TriggerFeed, TriggerSettings
from penstock.contracts.capture import ChangeCapture, ChangeStream
from penstock.contracts.provisioning import CaptureProvisioning, CoverageReport
from penstock.postgres.capture_triggers import has_change_table
from penstock.postgres.change_table import ChangeTable, export_fence
from penstock.postgres.connection import connect
from penstock.postgres.consistent_read import export_consistent_read
from penstock.postgres.snapshot_export import ExportedSnapshot
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class TriggerCapture(ChangeCapture, CaptureProvisioning):
    """Captures the tables that have its triggers. Only one `live` stream at a time reads a change table; a
    second one waits for the first. `with_trigger_management` sets the tables that must have triggers, and
    whether the capture may create them. From the moment that a table has triggers, all its changes are kept
    until they are confirmed, even if there is no reader. So remove the triggers with
    `penstock.postgres.capture_triggers.remove` when the capture is no longer needed.
    """

    settings: TriggerSettings
    required: frozenset[TableName] = frozenset()
    manage: bool = False

    def with_trigger_management(self, required: AbstractSet[TableName], manage: bool) -> TriggerCapture:
        """Return a copy of this capture whose `live` ensures that the tables `required` have triggers. With
        `manage`, `live` creates the change table and the triggers if the role may. Otherwise it logs a
        warning with the SQL to run for missing triggers, and continues without them.
        """
        return replace(self, required=frozenset(required), manage=manage)

    # --- ChangeCapture --------------------------------------------------------------------------------------

    @override
    def live(self) -> ChangeStream:
        """Create missing objects, then follow the change table. Raises at once if the stream cannot start.
        `next` raises errors that occur later, for example if the change table was dropped, or was filled by
        another server. Any thread may call `close`, which ends a waiting `next`. An unreadable value ends the
        stream as with a `WalCapture`.
        """
        settings = self.settings
        coverage = ensure_or_warn(self, self.required, self.manage, {"schema": settings.name})
        with connect(settings.address) as connection:
            provision.check_usable(connection, settings.name, coverage)
            ChangeTable(connection, settings.name).inspect()
        register(settings.spool)
        return LiveChanges(
            settings.spool,
            FeedCapture(TriggerFeed(settings), settings.feed),
            reject_inexact=settings.types.rejects_inexact,
        )

    @override
    def snapshot(self, tables: Sequence[TableName]) -> ChangeStream:
        """Read the tables under one snapshot, with one connection at a time. It does not wait for open
        transactions. The snapshot's connection stays open until the stream ends, and makes the server keep
        dead rows: read the stream to its end, or close it.
        """
        settings = self.settings
        return snapshot_changes(settings.address, tables, _exported(settings), settings.types)

    @override
    def lag(self) -> int | None:
        """Bytes of WAL between the confirmed position and the current position; None until the change table
        exists.
        """
        with connect(self.settings.address) as connection:
            if not has_change_table(connection, self.settings.name):
                return None
            state = ChangeTable(connection, self.settings.name).inspect()
            return max(0, state.server - state.confirmed)

    # --- CaptureProvisioning --------------------------------------------------------------------------------

    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        return provision.inspect_trigger_coverage(self.settings.address, self.settings.name, required)

    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        return provision.ensure_trigger_coverage(
            self.settings.address, self.settings.name, required, manage, partly=True
        )


@contextmanager
def _exported(settings: TriggerSettings) -> Iterator[ExportedSnapshot]:
    """Export a snapshot together with the position at which it is exact. The change table gives the position.
    If there is no change table yet, a consistent read gives it, and the position is before all changes that a
    change table created later will contain.
    """
    with connect(settings.address) as connection:
        is_there = has_change_table(connection, settings.name)
    with (
        export_fence(settings.address, settings.name)
        if is_there
        else export_consistent_read(settings.address) as exported
    ):
        yield exported
