"""`WalCapture`: the capture contracts for Postgres, over logical replication. The live stream runs a
`SpoolCapture` and reads its spool. It resumes after the position that it has released in the spool or,
without a spool, after the slot's `confirmed_flush_lsn`. A snapshot is read under an exported snapshot, and
its values are decoded in the same way as those of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from typing_extensions import override

from penstock.capture import provision
from penstock.capture.change_stream import CONSUMER, LiveChanges, register
from penstock.capture.events import snapshot_changes
from penstock.capture.settings import CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.capture.source_checks import MembershipWatch, check_publication, ensure_or_warn
from penstock.contracts.capture import ChangeCapture, ChangeStream
from penstock.contracts.provisioning import CaptureProvisioning, CoverageReport
from penstock.position import Position
from penstock.postgres.connection import connect
from penstock.postgres.slot import check_server, current_position, ensure_slot, inspect_server, inspect_slot
from penstock.postgres.snapshot_export import export_snapshot
from penstock.schema import TableName
from penstock.spool.ownership import load_identity


@dataclass(frozen=True, slots=True)
class WalCapture(ChangeCapture, CaptureProvisioning):
    """Captures the tables of one publication through one slot.

    The server needs `wal_level = logical`. The first `live` creates the slot. The publication must exist
    before that, or be managed: `with_publication_management` sets the tables that it must contain and whether
    the capture may create it. Only one `live` stream at a time can use a slot and a spool; a second one waits
    until the first is closed.

    The spool may be lost at any time: the slot retains all unconfirmed changes. This does not hold with
    `confirm = spooled`, or while the slot retains more than `max_retained_bytes`: the spool may then contain
    the only copy of changes, and must be stored as safely as a database.
    """

    settings: CaptureSettings
    """The tables in `settings.tables` are required and managed, unless `with_publication_management` was
    called.
    """
    required: frozenset[TableName] | None = None
    manage: bool = False
    takes: frozenset[TableName] | None = None
    """The tables that the caller reads, all of which must be published. None stands for all published tables.
    """

    def with_publication_management(self, required: AbstractSet[TableName], manage: bool) -> WalCapture:
        """Return a copy of this capture whose `live` ensures that the publication contains `required`. With
        `manage`, `live` creates or extends the publication if the role may. Otherwise it logs a warning with
        the SQL to run for missing tables, and continues without them.
        """
        return replace(self, required=frozenset(required), manage=manage)

    # --- ChangeCapture --------------------------------------------------------------------------------------

    @override
    def live(self) -> ChangeStream:
        """Create missing objects, then stream the changes of the slot.

        Raises at once if the stream cannot start, for example if the server cannot be reached. It also raises
        if a table was out of the publication for some time since the last run, because the server does not
        send its changes from that time. `next` raises errors that occur later: a table leaves the publication
        (detected within half a minute); the slot is dropped, invalidated or advanced by others; the spool is
        full because other consumers are behind; the server sends invalid protocol bytes. Any thread may call
        `close`, which ends a waiting `next`.

        One stream contains all tables, so an unreadable value ends it for all of them. With
        `types.on_unrepresentable: error`, a value that its type cannot hold also ends the stream. All
        transactions before that of the value are delivered, then `next` raises an error that names table and
        column. This repeats after each restart until the policy accepts the value.

        If partitions do not log their root's key, `live` raises `PartitionIdentityError`, and `next` of a
        running stream raises it within half a minute. The error names the tables, and its hint is the
        statement for each partition. Unconfirmed changes are not lost: after the statements have been run,
        `live` continues after the last confirmed position.
        """
        settings = self.settings
        with connect(settings.address) as connection:
            # Checked first, so that nothing is created on a server that cannot be used.
            check_server(inspect_server(connection))
            coverage = self._ensure_coverage()
            has_slot = inspect_slot(connection, settings.slot) is not None
            check_publication(connection, settings, has_slot=has_slot, coverage=coverage)
            # If the spool was filled from a slot that no longer exists, `SpoolCapture` raises instead of
            # continuing over the hole.
            is_first = not has_slot and load_identity(settings.spool) is None
            # Recorded before the slot is created, so that the memberships hold for all changes of the slot.
            members = self._members()
            members.check(is_first=is_first)
            if is_first:
                ensure_slot(settings.address, connection, settings.slot, failover=settings.failover)
        register(settings.spool)
        capture = SpoolCapture(replace(settings, tables=()), members)
        return LiveChanges(settings.spool, capture, reject_inexact=settings.types.rejects_inexact)

    @override
    def snapshot(self, tables: Sequence[TableName]) -> ChangeStream:
        """Read the tables under one exported snapshot, with one connection at a time. Exporting it waits for
        the transactions that are open at that moment. The snapshot's connection stays open until the stream
        ends, and makes the server keep dead rows: read the stream to its end, or close it.
        """
        settings = self.settings
        return snapshot_changes(
            settings.address, tables, export_snapshot(settings.address), settings.types, settings.publication
        )

    @override
    def lag(self) -> int | None:
        """Bytes of WAL between the slot's `confirmed_flush_lsn` and the current position; None until the slot
        exists.
        """
        with connect(self.settings.address) as connection:
            slot = inspect_slot(connection, self.settings.slot)
            if slot is None or slot.confirmed == Position.ZERO:  # still being created
                return None
            return max(0, current_position(connection) - slot.confirmed)

    # --- CaptureProvisioning --------------------------------------------------------------------------------

    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        return provision.inspect_coverage(
            self.settings.address, self.settings.publication, required, old_rows=self.settings.old_rows
        )

    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        return provision.ensure_coverage(
            self.settings.address,
            self.settings.publication,
            required,
            manage,
            partly=True,
            old_rows=self.settings.old_rows,
        )

    def _ensure_coverage(self) -> CoverageReport | None:
        """Returns None if the capture has no tables to publish."""
        tables = frozenset(self.settings.tables)
        required, manage = (tables, bool(tables)) if self.required is None else (self.required, self.manage)
        if self.required is None and not tables:
            return None
        return ensure_or_warn(self, required, manage, {"publication": self.settings.publication})

    def _members(self) -> MembershipWatch:
        required = frozenset(self.settings.tables) if self.required is None else self.required
        return MembershipWatch(self.settings, CONSUMER, required, self.takes)
