"""Which tables the pipeline has, kept current while it runs.

Looked at again when the configuration's file or an order changes, and every few seconds for tables that were created since and match a
pattern. New ones join, those that are no longer selected leave, others are paused, resumed or renewed; the stream goes on meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

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
from penstock.pipeline.apply import EpochApplier
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.error_policy import Action, decide
from penstock.pipeline.existing import await_copies, take_over
from penstock.pipeline.following.gone import why_gone
from penstock.pipeline.following.parts_watch import PartsWatch
from penstock.pipeline.following.sightings import Look
from penstock.pipeline.following.type_watch import AlteredTypes, TypeWatch
from penstock.pipeline.membership import departed
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.orders import TableOrders, change_orders, load_orders
from penstock.pipeline.retries import RetryLog
from penstock.pipeline.sides import side_of
from penstock.pipeline.snapshots.background import BackgroundSnapshots
from penstock.pipeline.states import TableState, TableStatus
from penstock.pipeline.tables import Selection, Tables, inspect_pipeline, select_tables
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import Connection, connect
from penstock.postgres.slot import nudge
from penstock.schema import TableName
from penstock.sinks.base import Sink
from penstock.sinks.layout import Mode

_log = logging.getLogger(__name__)

_GLANCE_SECONDS = 1.0
_LOOK_SECONDS = 10.0
_SUBJECT = "look at the source's tables"


@dataclass(slots=True)
class Roster:
    """Used by the pipeline's main thread alone."""

    config: PipelineConfig
    sink: Sink
    applier: EpochApplier
    snapshots: BackgroundSnapshots
    renew: Callable[[CatalogTable, Mapping[TableName, str]], None]
    """Copy this table anew beside its target, unless that is being done; and by which act it is published now."""
    abandon: Callable[[TableName], None]
    """If it is being copied anew, let that be."""
    observer: PipelineObserver
    reload: Callable[[], PipelineConfig] | None = None
    """Reads the configuration's file again; None if there is none."""
    retries: RetryLog = field(default_factory=RetryLog)
    _failures: int = 0
    _orders: TableOrders | None = None
    _leaving: set[TableName] = field(default_factory=set)
    _sources: dict[TableName, tuple[TableName, ...]] = field(default_factory=dict)
    """Of which tables of the source each one consists."""
    _mended: set[int] = field(default_factory=set)
    _glanced_at: float = 0.0
    _looked_at: float = 0.0
    _told: str | None = None
    _unread: dict[TableName, int] = field(default_factory=dict)
    """How often the target of a table that is to be resynced could not be read."""
    _parts: PartsWatch = field(init=False)
    _types: TypeWatch = field(init=False)

    def __post_init__(self) -> None:
        self._parts = PartsWatch(self.config.state, self.applier.truncates, self._renews)
        self._types = TypeWatch(self.config.state, lambda name, altered: self._renews(name) or self._loses_rows(name, altered))

    def _renews(self, name: TableName) -> bool:
        return self.config.schema_rule(name).renews

    def _loses_rows(self, name: TableName, altered: AlteredTypes) -> bool:
        """Whether later changes would not find their rows in the target, whose keys have the former text."""
        return altered.is_key and self.config.mode_of(name) is not Mode.APPEND

    @property
    def is_settled(self) -> bool:
        """Whether all has come of the last look that is to come of it."""
        return not (self._parts.open or self._types.open)

    def keep(self) -> None:
        """Called all the time; does nothing most of the time."""
        now = time.monotonic()
        if now - self._glanced_at < _GLANCE_SECONDS:
            return
        self._glanced_at = now
        try:
            changed = self._read()
            if changed or not self.is_settled or now - self._looked_at >= _LOOK_SECONDS:
                self._looked_at = now
                self._look(self._orders or TableOrders())
                self._told, self._failures = None, 0
                self.retries.clear(_SUBJECT)
        except Exception as error:  # noqa: BLE001 the epochs go on; the next look may succeed
            self._failures += 1
            shown = error if isinstance(error, PenstockError) else SourceError(f"the tables could not be looked at: {describe(error)}")
            self.retries.note(_SUBJECT, shown, self._failures, _LOOK_SECONDS)
            self._tell(str(shown))

    def _read(self) -> bool:
        """Take in the file and the orders; whether anything is new. A file that cannot be read changes nothing."""
        orders = load_orders(self.config.state)
        changed = orders != self._orders
        self._orders = orders
        if self.reload is not None:
            config = self.reload()
            if config.tables != self.config.tables:
                changed = True
                self.config = self.config.model_copy(update={"tables": config.tables})
            elif config != self.config:
                self._tell("the configuration has changed in more than its tables: restart the pipeline to use it")
        return changed

    def _tell(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            self.observer.interrupted(reason, 0.0)

    def _look(self, orders: TableOrders) -> None:
        config = self.config.with_tables(orders.added, orders.removed)
        side = side_of(self.config)
        with connect(self.config.source.address()) as connection:
            # Before the tables are looked at: one that is dropped between the two is none that left.
            sources = [source for sources in self._sources.values() for source in sources]
            left = side.departures(connection, sources)
            misfits = side.misfits(connection, sources)
            selection = select_tables(connection, self.config, seen=side.seen)
            lost = {name: oid for name, oid in self.applier.oids.items() if config.has(name) and not selection.knows(name)}
            gone = why_gone(connection, lost, config.selects)
            moved = self._moved(connection, selection, orders)
        self._remove([name for name in self.applier.statuses if not config.has(name)])
        self._welcome([name for name, each in self.applier.statuses.items() if each.state is TableState.GONE and name in selection.tables])
        self._learn(selection.tables)
        known = self.applier.statuses
        new = {name for name in (*selection.tables, *selection.refused) if name not in known and not self.snapshots.is_copying(name)}
        if new:
            self._add(_part(selection, new), orders)
        self._pause(orders)
        self._give_up(left, misfits, selection, orders)
        self.applier.notice(Look(selection.schemas, selection.seen_at, gone, moved))
        self._resync([name for name in orders.resync if config.has(name)], selection, gone)
        self._mend(selection)
        if self.applier.replay(orders.replay) or self.applier.is_stuck:
            with connect(self.config.source.address()) as connection:
                nudge(connection)

    def _give_up(
        self, left: Mapping[TableName, str], misfits: Mapping[TableName, PenstockError], selection: Selection, orders: TableOrders
    ) -> None:
        """Fail tables of which changes are in no log (`left`), or do not identify their rows (`misfits`).

        A table that is resynced needs none of them; another table of the name is for the epochs.
        """
        oids = self.applier.oids
        for name, table in selection.tables.items():
            status = self.applier.statuses.get(name)
            if status is None or name in orders.resync or not (status.is_followed or status.state is TableState.PAUSED):
                continue
            source = next((source.name for source in table.sources if source.name in left or source.name in misfits), None)
            if source is not None and oids.get(name) == table.oid:
                is_misfit = source in misfits
                error = misfits[source] if is_misfit else departed(source, left[source], name, self.sink.describe(name))
                self.applier.give_up(name, error)

    def _moved(self, connection: Connection, selection: Selection, orders: TableOrders) -> dict[TableName, str]:
        """Tables to resync for what the log does not show: partitions that brought or took rows, types that were altered."""
        known = {name: status for name, status in self.applier.statuses.items() if name not in orders.resync}
        applied = {name: status.applied for name, status in known.items() if status.is_followed}
        paused = [name for name, status in known.items() if status.state is TableState.PAUSED]
        side = side_of(self.config)
        moved = self._parts.look(
            connection, selection.tables, applied, paused, partial(side.seen, connection), finds_deletes=side.is_by_looks
        )
        altered = self._types.look(connection, selection.schemas, applied, orders.resync)
        moved |= {name: str(reason) for name, reason in altered.items()}
        for name in [name for name in moved if not self._renews(name)]:
            reason = moved.pop(name)
            if name in altered and self._loses_rows(name, altered[name]):
                hint = f"penstock tables resync {name} copies the table as it is now"
                self.applier.give_up(name, SchemaChangedError(f"changes of {name} no longer find their rows: {reason}", hint=hint))
            else:
                self.observer.interrupted(f"{name} keeps what it has: {reason}", 0.0)
        return moved

    def _mend(self, selection: Selection) -> None:
        """Copy tables anew that failed because those that go into them differed, and are alike by now. What they are then is tried once."""
        for name, status in self.applier.statuses.items():
            table = selection.tables.get(name)
            if table is None or name in selection.refused or MembersDifferError.code not in (status.reason or ""):
                continue
            if table.oid not in self._mended and self.config.schema_rule(name).renews:
                self._resync([name], selection, {})
                self._mended.add(table.oid)

    def _learn(self, tables: Mapping[TableName, CatalogTable]) -> None:
        self._sources |= {name: tuple(source.name for source in table.sources) for name, table in tables.items()}

    def part_with(self, known: Iterable[TableName], tables: Mapping[TableName, CatalogTable]) -> None:
        """Tables of the last epoch that are selected no more: they were removed while nobody ran, or a run ended in the middle of it.

        `tables` are those that there are.
        """
        self._learn(tables)
        for name in known:
            if name not in self.applier.statuses:
                self._part(name)

    def _remove(self, names: Iterable[TableName]) -> None:
        """The epochs let go of a table first: nobody writes to its target, or to its shadow, while these are given up."""
        for name in set(names) - self._leaving:
            self._leaving.add(name)
            self.applier.leave(name, partial(self._part, name))

    def _welcome(self, names: Iterable[TableName]) -> None:
        """Tables that were gone and are back: as new, once the epochs have let go of what they were."""
        for name in set(names) - self._leaving:
            self._leaving.add(name)
            self.applier.leave(name, partial(self._leaving.discard, name))
            self._looked_at = 0.0

    def _part(self, name: TableName) -> None:
        self.abandon(name)
        self.sink.disown(name)
        sources = set(self._sources.pop(name, (name,)))
        needed = {source for each in self._sources.values() for source in each}  # a table may go from one that leaves into another
        side_of(self.config).leave(sources - needed)
        self._leaving.discard(name)
        _log.info("table removed", extra={"table": str(name)})
        self.observer.table_left(name)

    def _add(self, selection: Selection, orders: TableOrders) -> None:
        config = self.config
        tables = inspect_pipeline(selection, self.sink, self.applier.last, config.schema_rule, config.existing_policy, is_alone=False)
        for name in tables.returned:
            self.sink.disown(name)
        try:
            if tables.capturable:
                side_of(config).ensure(tables, self.sink.describe, is_alone=False)
        except PenstockError as error:
            if error.recovery is not Recovery.OPERATOR:
                raise
            for name in tables.going:
                tables.statuses[name] = TableStatus.failed(error, None)
        take_over(tables, self.sink, config.state)
        await_copies(tables, self.sink, load_orders(config.state))
        self._admit(tables, orders)

    def _admit(self, tables: Tables, orders: TableOrders) -> None:
        for name, status in tables.statuses.items():
            if status.state is TableState.FAILED:
                self.applier.admit(name, status)
                self.observer.table_failed(name, status)
            elif name in tables.targets:
                self.applier.rejoin(tables.targets[name], paused=name in orders.paused)
            elif status.state is TableState.SNAPSHOTTING:
                self.applier.await_copy(name)
            elif name in orders.paused:
                self.applier.admit(name, replace(status, state=TableState.PAUSED))
        pending = [table for table in tables.pending if table.name not in orders.paused]
        if pending:
            for table in pending:
                self.applier.expect(table.name)
            self.snapshots.start(pending)

    def _pause(self, orders: TableOrders) -> None:
        for name, status in self.applier.statuses.items():
            if name in orders.paused and status.is_followed:
                self.applier.pause(name)
            elif name not in orders.paused and status.state is TableState.PAUSED:
                self._resume(name, status)

    def _resync(self, names: Iterable[TableName], selection: Selection, gone: Mapping[TableName, str]) -> None:
        for name in names:
            status = self.applier.statuses.get(name)
            if status is None or self.snapshots.is_copying(name):
                continue  # it is being copied, or soon will be
            if name in gone and not status.is_followed:
                change_orders(self.config.state, partial(TableOrders.renewed, name=name))
                self.applier.lose(name, gone[name])
            elif name in selection.refused or name not in selection.tables:
                reason = str(selection.refused.get(name) or "the source has no such table")
                self._tell(f"{name} cannot be copied anew: {reason}")
                self.applier.give_up_copy(name, reason)
            else:
                self._resync_target(selection.tables[name])

    def _resync_target(self, table: CatalogTable) -> None:
        """A table without a target is copied as a new one. A target that cannot be read holds up no other table."""
        name = table.name
        try:
            target = self.sink.load_target(name)
        except Exception as error:
            if isinstance(error, ConnectionLostError) or decide(error, name).action is Action.STOP:
                raise
            hint = f"restore {self.sink.describe(name)}, or remove it: the table is then copied as a new one"
            unread = TableFailedError(f"table {name} cannot be resynced, because its target cannot be read: {describe(error)}", hint=hint)
            self._unread[name] = self._unread.get(name, 0) + 1
            self.retries.note(f"resync of {name}", unread, self._unread[name], _LOOK_SECONDS)
            return
        if self._unread.pop(name, None) is not None:
            self.retries.clear(f"resync of {name}")
        if target is None:
            change_orders(self.config.state, partial(TableOrders.renewed, name=name))
            self.applier.leave(name)
            self._looked_at = 0.0
        else:
            self._renew(table)

    def _renew(self, table: CatalogTable) -> None:
        """What is wrong with a table may be that it is not published; its copy would be stale from the first moment."""
        self.renew(table, side_of(self.config).renew([source.name for source in table.sources]))

    def _resume(self, name: TableName, status: TableStatus) -> None:
        """A table that was paused before it was copied is as new."""
        if status.applied is not None:
            self.applier.resume(name)
        else:
            self.applier.leave(name)
            self._looked_at = 0.0


def _part(selection: Selection, names: set[TableName]) -> Selection:
    return Selection(
        {name: table for name, table in selection.tables.items() if name in names},
        {name: schema for name, schema in selection.schemas.items() if name in names},
        {name: error for name, error in selection.refused.items() if name in names},
        selection.seen_at,
    )
