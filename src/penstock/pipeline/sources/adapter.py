"""Source operations other than reading changes (identity, provisioning, snapshots), one `SourceAdapter` per
capture method.

`source_adapter` is the only place in the pipeline that chooses by capture method. Everything that depends on
the capture method is an operation of `SourceAdapter`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace

from typing_extensions import override

from penstock.capture.polling.copies import CopyExport
from penstock.capture.polling.feed import PollingFeed
from penstock.capture.polling.settings import PollingSettings
from penstock.capture.polling.tables import find_tables, inspect_polled
from penstock.capture.provision import (
    blocked,
    check_coverage,
    ensure_capture,
    inspect_coverage,
    partition_blockers,
)
from penstock.capture.settings import CaptureMethod
from penstock.capture.source_checks import check_same_system
from penstock.capture.trigger.provision import ensure_trigger_coverage, inspect_trigger_coverage
from penstock.config.model import PipelineConfig
from penstock.errors import (
    ChangeTableMissingError,
    PenstockError,
    SlotMissingError,
    SystemChangedError,
    UncheckedTimelineError,
)
from penstock.lag import unreserved_slot
from penstock.pipeline.epoch_log import Epoch
from penstock.pipeline.sources.base import Describe, SourceAdapter
from penstock.pipeline.sources.resume_checks import (
    check_log,
    check_origin,
    interrupted_tables,
    load_memberships,
    record_memberships,
)
from penstock.pipeline.table_states import TableStatus
from penstock.pipeline.tables import Tables, fail_blocked, fail_over_holes, fail_unpublished
from penstock.position import Position
from penstock.postgres.capture_triggers import (
    detach,
    has_change_table,
    inspect_begin,
    inspect_trigger_memberships,
)
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.change_table import ChangeTable, TableState, check_reader, export_fence
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.consistent_read import flush_log
from penstock.postgres.membership import (
    Membership,
    inspect_memberships,
    inspect_partition_identities,
    is_same_act,
)
from penstock.postgres.publication import drop_table
from penstock.postgres.server import SystemIdentity, identify_system, log_wait
from penstock.postgres.slot import (
    COPY_AGAIN,
    OnWait,
    Slot,
    check_server,
    current_position,
    inspect_server,
    inspect_slot,
)
from penstock.postgres.snapshot_export import Export, ExportedSnapshot, export_snapshot
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader


class SlotSource(SourceAdapter):
    """Logical replication: a slot and a publication."""

    check_steps = ("server", "replication", "slot", "tables", "publication", "reading", "continuity")
    needs_tables_first = True

    @override
    def check_server(self, connection: Connection) -> None:
        check_server(inspect_server(connection))

    @override
    def begins_at(self, connection: Connection) -> Position:
        slot = inspect_slot(connection, self.slot)
        return slot.confirmed if slot is not None else Position.ZERO

    @property
    @override
    def slot(self) -> str:
        return self._config.slot

    @property
    @override
    def publication(self) -> str:
        return self._config.publication

    @property
    @override
    def export(self) -> Export:
        return export_snapshot

    @override
    def identify(self) -> SystemIdentity:
        return identify_system(self._address)

    @override
    def check_origin(
        self, connection: Connection, tables: Tables, last: Epoch | None, system: SystemIdentity
    ) -> None:
        slot = inspect_slot(connection, self._config.slot)
        check_origin(self._address, self._config, tables, last, system=system, slot=slot)

    @override
    def inspect_risks(self, connection: Connection) -> list[PenstockError]:
        slot = inspect_slot(connection, self._config.slot)
        danger = unreserved_slot(slot.wal_status, f"slot {slot.name}") if slot is not None else None
        return [danger] if danger is not None else []

    @override
    def ensure(
        self, tables: Tables, describe: Describe, *, is_alone: bool, on_wait: OnWait = log_wait
    ) -> None:
        config = self._config
        wanted, old_rows = tables.capturable, config.source.old_rows
        report = inspect_coverage(
            self._address, config.publication, wanted, old_rows=old_rows, unkeyed=config.unkeyed(wanted)
        )
        fail_blocked(tables, report)
        _, added = self._ensure_capture(tables.capturable, on_wait)
        fail_unpublished(tables, added, describe)
        with connect(self._address) as connection:
            found = inspect_memberships(connection, config.publication, tables.owners)
            recorded = load_memberships(config.state)
            # A table that was removed from the publication and added again looks as if it had never been
            # removed.
            record_memberships(config, tables, recorded, found, describe, is_alone=is_alone)
            check_log(connection, config, tables, describe, is_alone=is_alone)

    @override
    def interrupted_tables(self, connection: Connection, tables: Iterable[TableName]) -> dict[TableName, str]:
        tables = list(tables)
        return interrupted_tables(
            load_memberships(self._config.state),
            inspect_memberships(connection, self.publication, tables),
            tables,
        )

    @override
    def unidentified_tables(
        self, connection: Connection, tables: Iterable[TableName]
    ) -> dict[TableName, PenstockError]:
        config, tables = self._config, list(tables)
        mismatches = inspect_partition_identities(
            connection,
            tables,
            config.publication,
            old_rows=config.source.old_rows,
            unkeyed=config.unkeyed(tables),
        )
        return {
            table: blocked([blocker])
            for blocker in partition_blockers(mismatches)
            for table in blocker.tables
        }

    @override
    def provision_resync(self, tables: Sequence[TableName]) -> Mapping[TableName, Membership]:
        self._ensure_capture(tables)
        with connect(self._address) as connection:
            return inspect_memberships(connection, self.publication, tables)

    def _ensure_capture(
        self, tables: Sequence[TableName], on_wait: OnWait = log_wait
    ) -> tuple[Slot, list[TableName]]:
        source = self._config.source
        return ensure_capture(
            self._address,
            self.slot,
            self.publication,
            tables,
            failover=source.failover,
            old_rows=source.old_rows,
            unkeyed=self._config.unkeyed(tables),
            on_wait=on_wait,
        )

    @override
    def deprovision(self, tables: Collection[TableName]) -> None:
        if self._config.owns_publication:
            with connect(self._address) as connection:
                for table in tables:
                    drop_table(connection, self._config.publication, table)


class PollingSource(SourceAdapter):
    """Polling. The resume point is stored in the state directory or in the source."""

    check_steps = ("version", "tables", "polling", "reading")
    can_align = False

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self._settings = PollingSettings.of(config.capture_settings())

    @property
    @override
    def positions_are_polls(self) -> bool:
        return True

    @override
    def begins_at(self, connection: Connection) -> Position:
        mark = self._settings.resume.load_mark()
        return mark.position if mark is not None else Position.ZERO

    @property
    @override
    def export(self) -> Export:
        return CopyExport(self._settings)

    @override
    def goal(self, connection: Connection) -> Position:
        """Return a position after every poll so far. The last poll may have missed rows that became visible
        after it, so another poll is necessary.
        """
        flush_log(connection)
        return current_position(connection)

    @override
    def check_origin(
        self, connection: Connection, tables: Tables, last: Epoch | None, system: SystemIdentity
    ) -> None:
        """Raise an error if the targets were filled from another server. A new timeline is accepted, because
        the tables are then read again.
        """
        if last is not None:
            check_same_system(system, SystemIdentity.parse(last.system))

    @override
    def ensure(
        self, tables: Tables, describe: Describe, *, is_alone: bool, on_wait: OnWait = log_wait
    ) -> None:
        mark = self._settings.resume.load_mark()
        if mark is None and tables.filled:
            raise SlotMissingError(
                "the resume point of polling is lost: the changes since the targets were last updated "
                "cannot be found",
                hint=f"restore {self._settings.rules.resume or 'penstock.polling in the source'}, or "
                f"remove {self._config.sink.root} and "
                f"{self._config.state}, and run again to copy the tables again",
            )
        self._fail_unfit(tables)
        added = self._begin(tables.capturable)
        if mark is not None:
            fail_unpublished(tables, added, describe)
            fail_over_holes(
                tables,
                SpoolReader(self._config.spool).extent,
                mark.position,
                self._settings.name,
                describe,
                is_alone=is_alone,
            )

    @override
    def provision_resync(self, tables: Sequence[TableName]) -> Mapping[TableName, Membership]:
        self._begin(tables)
        return {}

    @override
    def deprovision(self, tables: Collection[TableName]) -> None:
        with connect(self._address) as connection:
            found = find_tables(connection, tables)
        self._settings.resume.remove_tables([table.oid for table in found])

    def _fail_unfit(self, tables: Tables) -> None:
        """Fail the tables that cannot be polled. If no table can be polled, raise an error."""
        with connect(self._address) as connection:
            refused = inspect_polled(
                connection, self._settings, find_tables(connection, tables.capturable)
            ).refused
        if refused.keys() >= set(tables.capturable):
            raise next(iter(refused.values()))
        owners = tables.owners
        for source, error in refused.items():
            name = owners.get(source, source)
            tables.statuses[name] = TableStatus.failed(error, tables.statuses[name].applied)

    def _begin(self, tables: Sequence[TableName]) -> list[TableName]:
        """Start to poll these tables. Returns the tables that were not polled before."""
        feed = PollingFeed(replace(self._settings, tables=tuple(tables)))
        if self._settings.resume.load_mark() is not None:
            return feed.add(tables)
        feed.ensure()
        return list(tables)


class TriggerSource(SourceAdapter):
    """Triggers and their change table. The configured `slot` is the schema of the change table."""

    check_steps = ("version", "tables", "triggers", "reading")

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self._name = config.slot
        self._copied: tuple[TableState, Position] | None = None
        """The state of the change table at the last snapshot, and the fence of that snapshot."""

    @property
    @override
    def change_table(self) -> str:
        return self._name

    @override
    def begins_at(self, connection: Connection) -> Position:
        return inspect_begin(connection, self._name)

    @override
    def whole_rows(self, connection: Connection, oids: Collection[int]) -> Collection[int]:
        """Return all of `oids`, because the triggers always write the whole old row."""
        return set(oids)

    @property
    @override
    def export(self) -> Export:
        return self._export

    @override
    def goal(self, connection: Connection) -> Position | None:
        """Order all commits so far in the change table. Returns a position at or after all of them; None
        before a new timeline has been accepted.
        """
        if not self._is_there(connection):
            return super().goal(connection)
        return self._sequence(connection)

    @override
    def seen(self, connection: Connection) -> Position | None:
        """Order all commits so far, and return a position at or after all of them. A commit that is ordered
        later gets a position after the current end of the WAL, even if it is older.
        """
        if not self._is_there(connection):
            return super().seen(connection)
        return self._sequence(connection)

    @override
    def check_origin(
        self, connection: Connection, tables: Tables, last: Epoch | None, system: SystemIdentity
    ) -> None:
        """Raise an error if the targets were filled from another server. A new timeline is accepted if the
        change table, which is replicated, has all changes that targets and spool have.
        """
        if last is not None:
            check_same_system(system, SystemIdentity.parse(last.system))
        if self._is_there(connection):
            table = ChangeTable(connection, self._name)
            state = table.inspect()
            recorded = Position.ZERO if last is None else last.position
            spooled = SpoolReader(self._config.spool).end or Position.ZERO
            check_reader(state, max(recorded, spooled, state.confirmed, *tables.filled.values()), self._name)
            if not state.is_accepted:
                table.accept()

    @override
    def ensure(
        self, tables: Tables, describe: Describe, *, is_alone: bool, on_wait: OnWait = log_wait
    ) -> None:
        config = self._config
        with connect(self._address) as connection:
            if tables.filled and not self._is_there(connection):
                raise ChangeTableMissingError(
                    f"the change table {self._name} no longer exists: the changes since it was last read "
                    "are lost",
                    hint=COPY_AGAIN,
                )
        fail_blocked(tables, inspect_trigger_coverage(self._address, self._name, tables.capturable))
        report = ensure_trigger_coverage(self._address, self._name, tables.capturable, manage=True)
        check_coverage(report)
        fail_unpublished(tables, sorted(report.missing), describe)
        with connect(self._address) as connection:
            found = inspect_trigger_memberships(connection, self._name, tables.owners)
            confirmed = ChangeTable(connection, self._name).inspect().confirmed
        recorded = {
            name: found[name] if name in found and is_same_act(before.act, found[name].act) else before
            for name, before in load_memberships(config.state).items()
        }
        # A table whose triggers were dropped and created again looks as if it had always had them.
        record_memberships(config, tables, recorded, found, describe, is_alone=is_alone)
        fail_over_holes(
            tables, SpoolReader(config.spool).extent, confirmed, self._name, describe, is_alone=is_alone
        )

    @override
    def interrupted_tables(self, connection: Connection, tables: Iterable[TableName]) -> dict[TableName, str]:
        tables = list(tables)
        return interrupted_tables(
            load_memberships(self._config.state),
            inspect_trigger_memberships(connection, self._name, tables),
            tables,
        )

    @override
    def provision_resync(self, tables: Sequence[TableName]) -> Mapping[TableName, Membership]:
        check_coverage(ensure_trigger_coverage(self._address, self._name, tables, manage=True))
        with connect(self._address) as connection:
            return inspect_trigger_memberships(connection, self._name, tables)

    @override
    def deprovision(self, tables: Collection[TableName]) -> None:
        """Drop the triggers. With a separate capture they stay, because other pipelines may need them."""
        if self._config.source.process == "embedded":
            with connect(self._address) as connection:
                detach(connection, self._name, tables)

    def _export(
        self, address: SourceAddress, _on_wait: OnWait = log_wait, _tables: Sequence[CatalogTable] = ()
    ) -> AbstractContextManager[ExportedSnapshot]:
        """Export a snapshot and determine its fence. Does not wait for open transactions."""
        return self._fenced(address)

    @contextmanager
    def _fenced(self, address: SourceAddress) -> Iterator[ExportedSnapshot]:
        """Context manager that exports a snapshot and determines its fence. Raises an error if the server was
        promoted after the last snapshot, and lacks changes that the tables copied under that snapshot have.
        """
        with export_fence(address, self._name) as exported:
            with connect(address) as connection:
                state = ChangeTable(connection, self._name).inspect()
            before, fence = self._copied or (state, Position.ZERO)
            if (before.timeline, before.inherited) != (
                state.timeline,
                state.inherited,
            ) and fence > state.inherited:
                raise SystemChangedError(
                    f"tables were copied as of {fence}, and the change table {self._name} had only the "
                    f"changes up to {state.inherited} when the server was promoted: the copies may contain "
                    "changes that the server lost",
                    hint=COPY_AGAIN,
                )
            self._copied = (state, exported.fence)
            yield exported

    def _sequence(self, connection: Connection) -> Position | None:
        with suppress(UncheckedTimelineError):
            return ChangeTable(connection, self._name).sequence()
        return None

    def _is_there(self, connection: Connection) -> bool:
        return has_change_table(connection, self._name)


_ADAPTERS: dict[CaptureMethod, Callable[[PipelineConfig], SourceAdapter]] = {
    CaptureMethod.WAL: SlotSource,
    CaptureMethod.POLLING: PollingSource,
    CaptureMethod.TRIGGER: TriggerSource,
}
"""The source adapter of each capture method."""


def source_adapter(config: PipelineConfig) -> SourceAdapter:
    return _ADAPTERS[config.capture_method](config)
