"""Reconcile the running tables with configuration, overrides and catalog.

Also adopts or replaces target tables that the pipeline did not create.

The main thread reconciles when the configuration file or an override changes, and every ten seconds to find
new tables that match a pattern. It adds new tables, removes deselected tables, and pauses, resumes or resyncs
tables. The other tables continue to stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from penstock.config.model import PipelineConfig
from penstock.config.policies import ExistingPolicy
from penstock.errors import (
    ConnectionLostError,
    MembersDifferError,
    PenstockError,
    Recovery,
    SchemaChangedError,
    SourceError,
    TableFailedError,
)
from penstock.foreign import describe
from penstock.pipeline.applier import EpochApplier
from penstock.pipeline.error_policy import Action, decide
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.schema_changes.catalog_changes import AlteredTypes, TypeWatch, drop_reasons
from penstock.pipeline.schema_changes.partitions import PartitionWatch
from penstock.pipeline.schema_changes.tracker import CatalogSnapshot
from penstock.pipeline.snapshots.background import BackgroundSnapshots
from penstock.pipeline.sources.adapter import source_adapter
from penstock.pipeline.sources.resume_checks import interrupted_error
from penstock.pipeline.table_lifecycle import TableLifecycle
from penstock.pipeline.table_overrides import TableOverrides, change_overrides, load_overrides
from penstock.pipeline.table_selection import (
    Selection,
    find_changed_setting,
    inspect_pipeline,
    select_tables,
    unreadable_hint,
)
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.pipeline.tables import Tables
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import Connection, connect
from penstock.postgres.membership import Membership
from penstock.postgres.slot import nudge
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Sink

_log = logging.getLogger(__name__)


def take_over(tables: Tables, sink: Sink, state: Path) -> None:
    """Adopt or replace the target tables that the pipeline did not create, by the policy `existing`. An error
    fails only the table concerned.
    """
    for name, policy in tables.foreign.items():
        if tables.statuses[name].state is TableState.FAILED:
            continue
        try:
            if policy is ExistingPolicy.REPLACE:
                sink.remove_foreign(name)
            else:
                _adopt(tables.schemas[name], sink, state)
        except PenstockError as error:
            if error.recovery is not Recovery.OPERATOR:
                raise
            tables.statuses[name] = TableStatus.failed(error, None)
        else:
            _log.warning(
                "table was taken over",
                extra={"table": str(name), "policy": policy.value, "place": sink.describe(name)},
            )


def _adopt(schema: TableSchema, sink: Sink, state: Path) -> None:
    """Adopt a target. The resync of the table is requested first. If the run ended right after the adoption
    without this request, the next run would empty the target and copy the table as a new one.
    """
    change_overrides(state, lambda orders: orders.request_resync([schema.name]))
    needs_shadow = False
    try:
        needs_shadow = sink.adopt(schema)
    finally:
        if not needs_shadow:
            change_overrides(state, lambda orders: orders.clear_resync(schema.name))


def mark_adopted(tables: Tables, sink: Sink, orders: TableOverrides) -> None:
    """Set adopted tables to `snapshotting`. Their targets keep the old rows until the resync ends."""
    for name in orders.resync & tables.statuses.keys():
        if tables.statuses[name].state is TableState.PENDING and sink.load_target(name) is not None:
            tables.statuses[name] = TableStatus(TableState.SNAPSHOTTING)


_CHECK_SECONDS = 1.0
_QUERY_SECONDS = 10.0
_SUBJECT = "table reconciliation"


@dataclass(slots=True)
class TableReconciler:
    """Adds, removes, pauses and resyncs tables while the pipeline runs. Used by the pipeline's main thread
    only.
    """

    config: PipelineConfig
    sink: Sink
    applier: EpochApplier
    snapshots: BackgroundSnapshots
    start_resync: Callable[[CatalogTable, Mapping[TableName, Membership]], None]
    """Function that starts a resync of a table unless one is in progress. Its arguments are the table, and
    the membership of each of its source tables.
    """
    abandon: Callable[[TableName], None]
    """Function that ends a resync in progress."""
    observer: PipelineObserver
    reload: Callable[[], PipelineConfig] | None = None
    """Function that reads the configuration file again; None if there is no file."""
    retries: RetryLog = field(default_factory=RetryLog)
    _failures: int = 0
    _orders: TableOverrides | None = None
    _removing: set[TableName] = field(default_factory=set)
    _sources: dict[TableName, tuple[TableName, ...]] = field(default_factory=dict)
    """The source tables of each pipeline table: the table itself, or the members of a routed table."""
    _resynced_members: set[int] = field(default_factory=set)
    _checked_at: float = 0.0
    _queried_at: float = 0.0
    _announced: str | None = None
    _rejected: list[str] = field(default_factory=list)
    """The settings for which the configuration file was last rejected, with their tables."""
    _unread: dict[TableName, int] = field(default_factory=dict)
    """The number of consecutive failures for each table whose resync waits because its target cannot be read.
    """
    _parts: PartitionWatch = field(init=False)
    _types: TypeWatch = field(init=False)

    @property
    def tables(self) -> TableLifecycle:
        return self.applier.tables

    def __post_init__(self) -> None:
        self._parts = PartitionWatch(self.config.state, self.applier.truncates, self._auto_resyncs)
        self._types = TypeWatch(
            self.config.state,
            lambda name, altered: self._auto_resyncs(name) or self._loses_rows(name, altered),
        )

    def _auto_resyncs(self, name: TableName) -> bool:
        return self.config.schema_rule(name).auto_resync

    def _loses_rows(self, name: TableName, altered: AlteredTypes) -> bool:
        """Whether later changes would not find their rows, because keys in the target have the text form of
        the old type.
        """
        return altered.is_key and not self.config.mode_of(name).is_log

    @property
    def is_settled(self) -> bool:
        """Whether every changed partition and altered type that the last catalog query found has been
        handled.
        """
        return not (self._parts.open or self._types.open)

    def reconcile(self) -> None:
        """Reconcile if the configuration, an override or the catalog changed, or a periodic check is due.
        Called in every iteration of the main loop.
        """
        now = time.monotonic()
        if now - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = now
        try:
            changed = self._read()
            if changed or not self.is_settled or now - self._queried_at >= _QUERY_SECONDS:
                self._queried_at = now
                self._reconcile(self._orders or TableOverrides())
                self._announced, self._failures = None, 0
                self.retries.clear(_SUBJECT)
        except Exception as error:  # noqa: BLE001 the epochs continue; the next attempt may succeed
            self._failures += 1
            shown = (
                error
                if isinstance(error, PenstockError)
                else SourceError(f"the source's tables could not be read: {describe(error)}")
            )
            self.retries.note(_SUBJECT, shown, self._failures, _QUERY_SECONDS)
            self._announce(str(shown))

    def _read(self) -> bool:
        """Read the overrides and the configuration file. Returns whether overrides or tables changed. Raises
        an error, without a change of the configuration, if the file is not valid.
        """
        orders = load_overrides(self.config.state)
        changed = orders != self._orders
        self._orders = orders
        if self.reload is not None:
            config, lost = self.reload(), list[str]()
            if config.tables != self.config.tables:
                reloaded = self.config.model_copy(update={"tables": config.tables})
                lost = self._find_lost(reloaded, orders)
                if not lost:
                    changed, self.config = True, reloaded
                elif lost != self._rejected:
                    self.observer.announced(
                        "`tables:` in the configuration is not applied: its changes need a resync that would "
                        f"discard what only the target has ({'; '.join(lost)}). Restore the settings, or run "
                        "penstock tables resync"
                    )
            elif config != self.config:
                self._announce(
                    "settings other than tables: changed in the configuration; "
                    "restart the pipeline to apply them"
                )
            self._rejected = lost
        return changed

    def _find_lost(self, reloaded: PipelineConfig, orders: TableOverrides) -> list[str]:
        """Return the changed settings, with their tables, that the targets cannot follow without a loss."""
        wanted = reloaded.with_tables(orders.added, orders.removed)
        targets, statuses = self.tables.targets.copy(), self.tables.statuses  # epochs change them
        lost = []
        for name, target in targets.items():
            status = statuses.get(name)
            if status is None or status.is_over or name in orders.resync or not wanted.has(name):
                continue
            setting = find_changed_setting(None, target, wanted.schema_rule(name))
            if setting is not None:
                lost.append(f"{setting} of {name}")
        return lost

    def _announce(self, reason: str) -> None:
        if reason != self._announced:
            self._announced = reason
            self.observer.announced(reason)

    def _reconcile(self, orders: TableOverrides) -> None:
        config = self.config.with_tables(orders.added, orders.removed)
        side = source_adapter(self.config)
        with connect(self.config.source.address()) as connection:
            # Memberships are read before the tables: otherwise a table that is dropped between the two
            # queries would count as removed from the publication.
            sources = [source for sources in self._sources.values() for source in sources]
            interrupted = side.interrupted_tables(connection, sources)
            unidentified = side.unidentified_tables(connection, sources)
            selection = select_tables(connection, self.config, seen=side.seen)
            lost = {
                name: oid
                for name, oid in self.tables.oids.items()
                if config.has(name) and not selection.knows(name)
            }
            gone = drop_reasons(connection, lost, config.selects)
            moved = self._find_resyncs(connection, selection, orders)
        self._remove([name for name in self.tables.statuses if not config.has(name)])
        self._readd_recreated(
            [
                name
                for name, each in self.tables.statuses.items()
                if each.state is TableState.GONE and name in selection.tables
            ]
        )
        self._remember_sources(selection.tables)
        known = self.tables.statuses
        new = {
            name
            for name in (*selection.tables, *selection.refused)
            if name not in known and not self.snapshots.is_copying(name)
        }
        if new:
            self._add(_part(selection, new), orders)
        self._pause(orders)
        self._fail_interrupted(interrupted, unidentified, selection, orders)
        self.applier.observe_catalog(CatalogSnapshot(selection.schemas, selection.seen_at, gone, moved))
        self._resync([name for name in orders.resync if config.has(name)], selection, gone)
        self._resync_matching_members(selection)
        if self.applier.replay(orders.replay) or self.applier.is_stuck:
            with connect(self.config.source.address()) as connection:
                nudge(connection)

    def _fail_interrupted(
        self,
        interrupted: Mapping[TableName, str],
        unidentified: Mapping[TableName, PenstockError],
        selection: Selection,
        orders: TableOverrides,
    ) -> None:
        """Fail tables with missing changes (`interrupted`) or with changes that do not identify their rows
        (`unidentified`).

        Skips tables whose resync is requested. Also skips tables whose name now belongs to another source
        table, which epochs handle.
        """
        oids = self.tables.oids
        for name, table in selection.tables.items():
            status = self.tables.statuses.get(name)
            if (
                status is None
                or name in orders.resync
                or not (status.is_followed or status.state is TableState.PAUSED)
            ):
                continue
            source = next(
                (
                    source.name
                    for source in table.sources
                    if source.name in interrupted or source.name in unidentified
                ),
                None,
            )
            if source is not None and oids.get(name) == table.oid:
                error = unidentified.get(source) or interrupted_error(
                    source, interrupted[source], name, self.sink.describe(name)
                )
                self.tables.request_failure(name, error)

    def _find_resyncs(
        self, connection: Connection, selection: Selection, orders: TableOverrides
    ) -> dict[TableName, str]:
        """Return the tables to resync because of changes that the WAL does not show, each with the reason.
        The changes are altered types, and partitions with rows that were attached, detached, rewritten or
        separately truncated.

        A table without automatic resync fails if its later changes would not find their rows. Otherwise it
        keeps its rows, and the reason is announced.
        """
        known = {name: status for name, status in self.tables.statuses.items() if name not in orders.resync}
        applied = {name: status.applied for name, status in known.items() if status.is_followed}
        paused = [name for name, status in known.items() if status.state is TableState.PAUSED]
        side = source_adapter(self.config)
        moved = self._parts.find_moved(
            connection,
            selection.tables,
            applied,
            paused,
            partial(side.seen, connection),
            finds_deletes=side.positions_are_polls,
        )
        altered = self._types.find_altered(connection, selection.schemas, applied, orders.resync)
        moved |= {name: str(reason) for name, reason in altered.items()}
        for name in [name for name in moved if not self._auto_resyncs(name)]:
            reason = moved.pop(name)
            if name in altered and self._loses_rows(name, altered[name]):
                hint = f"penstock tables resync CONFIG {name} copies the table with its current values"
                self.tables.request_failure(
                    name,
                    SchemaChangedError(f"changes of {name} no longer find their rows: {reason}", hint=hint),
                )
            else:
                self.observer.announced(f"{name} is not resynced automatically and keeps its rows: {reason}")
        return moved

    def _resync_matching_members(self, selection: Selection) -> None:
        """Resync routed tables that failed because their members differed, once the members have the same
        columns. Orders the resync only once per set of members.
        """
        for name, status in self.tables.statuses.items():
            table = selection.tables.get(name)
            if (
                table is None
                or name in selection.refused
                or MembersDifferError.code not in (status.reason or "")
            ):
                continue
            if table.oid not in self._resynced_members and self.config.schema_rule(name).auto_resync:
                self.tables.order_resync(name, "its source tables have the same columns again")
                self._resynced_members.add(table.oid)

    def _remember_sources(self, tables: Mapping[TableName, CatalogTable]) -> None:
        self._sources |= {
            name: tuple(source.name for source in table.sources) for name, table in tables.items()
        }

    def remove_deselected(self, known: Iterable[TableName], tables: Mapping[TableName, CatalogTable]) -> None:
        """Remove tables of the last epoch (`known`) that are no longer selected, because they were deselected
        while the pipeline did not run, or because their removal was interrupted.

        `tables` are the selected tables.
        """
        self._remember_sources(tables)
        for name in known:
            if name not in self.tables.statuses:
                self._part(name)

    def _remove(self, names: Iterable[TableName]) -> None:
        """Remove tables from the pipeline. Epochs stop writing to a table first, because nothing may write to
        its target or its shadow while the table is removed.
        """
        for name in set(names) - self._removing:
            self._removing.add(name)
            self.tables.remove(name, partial(self._part, name))

    def _readd_recreated(self, names: Iterable[TableName]) -> None:
        """Add dropped tables that exist again as new tables, after the next epoch has removed the old
        ones.
        """
        for name in set(names) - self._removing:
            self._removing.add(name)
            self.tables.remove(name, partial(self._removing.discard, name))
            self._queried_at = 0.0

    def _part(self, name: TableName) -> None:
        self.abandon(name)
        self.snapshots.abandon(name)
        self.sink.release_ownership(name)
        sources = set(self._sources.pop(name, (name,)))
        needed = {
            source for each in self._sources.values() for source in each
        }  # a source table may move from a removed pipeline table to another one
        source_adapter(self.config).deprovision(sources - needed)
        self._removing.discard(name)
        _log.info("table removed", extra={"table": str(name)})
        self.observer.table_left(name)

    def _add(self, selection: Selection, orders: TableOverrides) -> None:
        config = self.config
        tables = inspect_pipeline(
            selection, self.sink, self.applier.last, config.schema_rule, config.existing_policy
        )
        for name in tables.returned:
            self.sink.release_ownership(name)
        try:
            if tables.capturable:
                source_adapter(config).ensure(tables, self.sink.describe, is_alone=False)
        except PenstockError as error:
            if error.recovery is not Recovery.OPERATOR:
                raise
            for name in tables.live:
                tables.statuses[name] = TableStatus.failed(error, None)
        for name in tables.unpublished:
            self.snapshots.abandon(name)
        take_over(tables, self.sink, config.state)
        mark_adopted(tables, self.sink, load_overrides(config.state))
        self._admit(tables, orders)

    def _admit(self, tables: Tables, orders: TableOverrides) -> None:
        for name, status in tables.statuses.items():
            if status.state is TableState.FAILED:
                self.tables.add_inactive(name, status)
                self.observer.table_failed(name, status)
            elif name in tables.targets:
                self.tables.add_filled(tables.targets[name], paused=name in orders.paused)
            elif status.state is TableState.SNAPSHOTTING:
                self.tables.add_adopted(name)
            elif name in orders.paused:
                self.tables.add_inactive(name, replace(status, state=TableState.PAUSED))
        pending = [table for table in tables.pending if table.name not in orders.paused]
        if pending:
            for table in pending:
                self.tables.add_pending(table.name)
                if table.name in orders.resync:  # the snapshot is newer than the request
                    change_overrides(self.config.state, partial(TableOverrides.clear_resync, name=table.name))
            self.snapshots.start(pending)

    def _pause(self, orders: TableOverrides) -> None:
        for name, status in self.tables.statuses.items():
            if name in orders.paused and status.is_followed:
                self.tables.pause(name)
            elif name not in orders.paused and status.state is TableState.PAUSED:
                self._resume(name, status)

    def _resync(
        self, names: Iterable[TableName], selection: Selection, gone: Mapping[TableName, str]
    ) -> None:
        for name in names:
            status = self.tables.statuses.get(name)
            if status is None or self.snapshots.is_copying(name):
                continue  # it is being copied, or will be soon
            if name in gone and not status.is_followed:
                change_overrides(self.config.state, partial(TableOverrides.clear_resync, name=name))
                self.tables.request_dropped(name, gone[name])
            elif name in selection.refused or name not in selection.tables:
                reason = str(selection.refused.get(name) or "the source has no such table")
                self._announce(f"{name} cannot be resynced: {reason}")
                self.tables.resync_failed(name, reason)
            else:
                self._resync_target(selection.tables[name])

    def _resync_target(self, table: CatalogTable) -> None:
        """Resync a table. If it has no target, it is copied as a new table. A target that cannot be read does
        not delay other tables.
        """
        name = table.name
        try:
            target = self.sink.load_target(name)
        except Exception as error:
            if isinstance(error, ConnectionLostError) or decide(error, name).action is Action.STOP:
                raise
            hint = unreadable_hint(self.sink.describe(name))
            unread = TableFailedError(
                f"table {name} cannot be resynced, because its target cannot be read: {describe(error)}",
                hint=hint,
            )
            self._unread[name] = self._unread.get(name, 0) + 1
            self.retries.note(f"resync of {name}", unread, self._unread[name], _QUERY_SECONDS)
            return
        if self._unread.pop(name, None) is not None:
            self.retries.clear(f"resync of {name}")
        if target is None:
            change_overrides(self.config.state, partial(TableOverrides.clear_resync, name=name))
            self.tables.remove(name)
            self._queried_at = 0.0
        else:
            self._start_resync(table)

    def _start_resync(self, table: CatalogTable) -> None:
        """Resync a table. The capture of its source tables is provisioned first, so that no change after the
        copy is missed.
        """
        self.start_resync(
            table, source_adapter(self.config).provision_resync([source.name for source in table.sources])
        )

    def _resume(self, name: TableName, status: TableStatus) -> None:
        """Resume a table. If it was paused before its snapshot, it is added as a new table."""
        if status.applied is not None:
            self.tables.resume(name)
        else:
            self.tables.remove(name)
            self._queried_at = 0.0


def _part(selection: Selection, names: set[TableName]) -> Selection:
    return Selection(
        {name: table for name, table in selection.tables.items() if name in names},
        {name: schema for name, schema in selection.schemas.items() if name in names},
        {name: error for name, error in selection.refused.items() if name in names},
        selection.seen_at,
    )
