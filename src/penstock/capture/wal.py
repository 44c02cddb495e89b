"""`WalCapture`: the contracts of a capture, for Postgres, over logical replication.

A view of the one engine. The live stream runs a `SpoolCapture` and reads its spool; the resume point is the slot's `confirmed_flush_lsn`,
preceded by what the spool has noted as released; a snapshot is read under an exported snapshot, by the stream's own decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from typing_extensions import override

from penstock.capture import provision
from penstock.capture.blockers import gap_text
from penstock.capture.live import CONSUMER, LiveChanges, register
from penstock.capture.membership import MemberWatch, check_publication
from penstock.capture.settings import CaptureSettings
from penstock.capture.snapshot import snapshot_changes
from penstock.capture.spooling import SpoolCapture
from penstock.contracts.capture import ChangeCapture, ChangeStream
from penstock.contracts.provisioning import CaptureProvisioning, CoverageReport
from penstock.position import Position
from penstock.postgres.connection import connect
from penstock.postgres.exported import export_snapshot
from penstock.postgres.slot import check_server, current_position, ensure_slot, inspect_server, inspect_slot
from penstock.schema import TableName
from penstock.spool.identity import load_identity

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WalCapture(ChangeCapture, CaptureProvisioning):
    """Captures the tables of one publication through one slot.

    The server needs `wal_level = logical`. The slot is created by the first `live`, after the publication, which must exist by then or be
    managed: `with_publication_management` says which tables it must hold and whether the capture may see to that. One `live` stream at a
    time may use a slot and a spool; a second one waits until the first has been closed.

    The spool may be lost at any time: the slot still has what is not confirmed. Only with `confirm = spooled`, or above
    `max_retained_bytes`, is the spool what holds it, and must be kept as carefully as a database.
    """

    settings: CaptureSettings
    """`tables` there, if any, are required and managed, unless `with_publication_management` says otherwise."""
    required: frozenset[TableName] | None = None
    manage: bool = False
    takes: frozenset[TableName] | None = None
    """Of which tables the caller uses the changes, all of which must come; None: of all that the publication gives."""

    def with_publication_management(self, required: AbstractSet[TableName], manage: bool) -> WalCapture:
        """The same capture, of which `live` sees to it that the publication holds `required`.

        With `manage` it creates or extends the publication, where the role may. Otherwise, what is missing is logged as a warning with the
        SQL to run, and the stream goes on without it.
        """
        return replace(self, required=frozenset(required), manage=manage)

    # --- ChangeCapture --------------------------------------------------------------------------------------------------

    @override
    def live(self) -> ChangeStream:
        """Make what is missing, then follow the slot.

        Raises at once what stands in the way before the stream exists, a server that cannot be reached among it, or a table that was out of
        the publication since it was last seen there: its changes in between are in no log. `next` raises what stops the stream later:
        the same, within half a minute; a slot that is gone, lost or moved by others; a spool that is full of somebody else's changes; bytes
        that are not the protocol. Its `close` may be called from any thread and ends a `next` that waits.

        A value that cannot be had, or that its type cannot hold where `types.on_unrepresentable` is `error`, ends the stream at its
        transaction, since one stream carries all tables: every transaction before it is delivered, then `next` raises the error that
        names table and column. So it does after each restart, until the policy takes the value.
        """
        settings = self.settings
        with connect(settings.address) as connection:
            # Before anything is made there that would be of no use.
            check_server(inspect_server(connection))
            self._ensure_coverage()
            has_slot = inspect_slot(connection, settings.slot) is not None
            check_publication(connection, settings, has_slot=has_slot)
            # A spool that was filled from a slot which is gone: the engine says so, instead of going on behind the hole.
            is_first = not has_slot and load_identity(settings.spool) is None
            # Before the slot is made: from there on, every table is in as it was seen.
            members = self._members()
            members.check(anew=True) if is_first else members.look()
            if is_first:
                ensure_slot(settings.address, connection, settings.slot, failover=settings.failover)
        register(settings.spool)
        capture = SpoolCapture(replace(settings, tables=()), members)
        return LiveChanges(settings.spool, capture, refuse_inexact=settings.types.refuses_inexact)

    @override
    def snapshot(self, tables: Sequence[TableName]) -> ChangeStream:
        """Under one exported snapshot, in one connection at a time. Taking it waits for the transactions that are open at that moment.

        The connection of the snapshot stays open until the stream ends, and with it the server keeps dead rows: read it through, or
        close it.
        """
        settings = self.settings
        return snapshot_changes(settings.address, tables, export_snapshot(settings.address), settings.types, settings.publication)

    @override
    def lag(self) -> int | None:
        """Bytes of WAL between the slot's `confirmed_flush_lsn` and where the server is; None until the slot exists."""
        with connect(self.settings.address) as connection:
            slot = inspect_slot(connection, self.settings.slot)
            if slot is None or slot.confirmed == Position.ZERO:  # still being created
                return None
            return max(0, current_position(connection) - slot.confirmed)

    # --- CaptureProvisioning --------------------------------------------------------------------------------------------

    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        return provision.inspect_coverage(self.settings.address, self.settings.publication, required, old_rows=self.settings.old_rows)

    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        return provision.ensure_coverage(
            self.settings.address, self.settings.publication, required, manage, old_rows=self.settings.old_rows
        )

    def _ensure_coverage(self) -> None:
        tables = frozenset(self.settings.tables)
        required, manage = (tables, bool(tables)) if self.required is None else (self.required, self.manage)
        report = self.ensure_coverage(required, manage)
        if report.satisfied or (manage and report.manageable):
            return
        _log.warning(
            "publication does not cover every required table; %s",
            gap_text(report),
            extra={"publication": self.settings.publication, "missing": sorted(map(str, report.missing))},
        )

    def _members(self) -> MemberWatch:
        required = frozenset(self.settings.tables) if self.required is None else self.required
        return MemberWatch(self.settings, CONSUMER, required, self.takes)
