"""What a pipeline asks of its source beside the changes themselves, which depends on how these are learned of.

Is it the source that the targets were filled from, are all tables captured, is everything there that the targets lack, and as of which
place in the log is a snapshot exact: `WalSide` answers by slot and publication, `PollingSide` by where polling goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from penstock.capture.blockers import partition_blockers
from penstock.capture.choosing import polling_settings
from penstock.capture.continuity import check_same_system
from penstock.capture.polling_copies import CopyExport
from penstock.capture.polling_feed import PollingFeed
from penstock.capture.polling_settings import PollingSettings
from penstock.capture.polling_tables import find_tables, inspect_polled
from penstock.capture.provision import blocked, ensure_capture, inspect_coverage
from penstock.errors import PenstockError, SlotMissingError
from penstock.lag import unreserved_slot
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import Epoch
from penstock.pipeline.membership import departures, fail_rejoined, load_memberships, save_memberships
from penstock.pipeline.standing import check_log, check_origin
from penstock.pipeline.states import TableStatus
from penstock.pipeline.tables import Tables, fail_blocked, fail_over_holes, fail_unpublished
from penstock.position import Position
from penstock.postgres.capture_triggers import inspect_begin
from penstock.postgres.connection import Connection, connect
from penstock.postgres.exported import Export, export_snapshot
from penstock.postgres.health import log_wait
from penstock.postgres.horizon import shown_position
from penstock.postgres.moments import flush_log, inspect_system
from penstock.postgres.partition_identity import inspect_partition_identities
from penstock.postgres.publication import drop_table, inspect_memberships
from penstock.postgres.slot import OnWait, Slot, check_server, current_position, inspect_server, inspect_slot
from penstock.postgres.timeline import SystemIdentity, identify_system
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader

Describe = Callable[[TableName], str]


class CaptureSide(ABC):
    """For one configuration, as it is by then."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._address = config.source.address()

    @property
    def slot(self) -> str | None:
        """Without which copying a table is pointless; None if there is no such thing."""
        return None

    @property
    def publication(self) -> str | None:
        return None

    @property
    def is_by_looks(self) -> bool:
        """Whether changes come by looks: what happened right before a place in the log is in the first look after it."""
        return False

    def goal(self, connection: Connection) -> Position | None:
        """Where a run has to come to that is to bring everything that has committed by now. None: not before `check_origin`."""
        return current_position(connection)

    def seen(self, connection: Connection) -> Position | None:
        """Where all changes are that were made before what this connection has just seen of the catalog: at this position, or before.

        None: it cannot be told now.
        """
        return shown_position(connection)

    @property
    @abstractmethod
    def export(self) -> Export:
        """How a snapshot is taken, and the position at which it is exact."""

    def identify(self) -> SystemIdentity:
        """Which server this is."""
        with connect(self._address) as connection:
            return inspect_system(connection)

    @abstractmethod
    def check_origin(self, connection: Connection, tables: Tables, last: Epoch | None, system: SystemIdentity) -> None:
        """Raise unless the server is fit, and the one that the targets were filled from."""

    def inspect_dangers(self, connection: Connection) -> list[PenstockError]:
        """What does not stop a run, and may stop a later one."""
        del connection
        return []

    @abstractmethod
    def ensure(self, tables: Tables, describe: Describe, *, is_alone: bool, on_wait: OnWait = log_wait) -> None:
        """See to it that the tables' changes arrive; those of which some are missing fail. `is_alone`: there are no others that go on."""

    def departures(self, connection: Connection, tables: Iterable[TableName]) -> dict[TableName, str]:
        """Of tables that are captured: those of which changes may be missing, and why. A look while the pipeline runs, so a cheap one."""
        return {}

    def misfits(self, connection: Connection, tables: Iterable[TableName]) -> dict[TableName, PenstockError]:
        """Of tables that are captured: those whose changes no longer identify their rows. Asked while the pipeline runs, so it is cheap."""
        return {}

    @abstractmethod
    def renew(self, tables: Sequence[TableName]) -> Mapping[TableName, str]:
        """See to it before tables are copied anew; gives by which act each is captured now."""

    @abstractmethod
    def leave(self, tables: Collection[TableName]) -> None:
        """These are no longer needed by this pipeline."""


class WalSide(CaptureSide):
    """Slot and publication."""

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
    def check_origin(self, connection: Connection, tables: Tables, last: Epoch | None, system: SystemIdentity) -> None:
        slot = inspect_slot(connection, self._config.slot)
        check_origin(self._address, self._config, tables, last, system=system, slot=slot)

    @override
    def inspect_dangers(self, connection: Connection) -> list[PenstockError]:
        slot = inspect_slot(connection, self._config.slot)
        danger = unreserved_slot(slot.wal_status, f"slot {slot.name}") if slot is not None else None
        return [danger] if danger is not None else []

    @override
    def ensure(self, tables: Tables, describe: Describe, *, is_alone: bool, on_wait: OnWait = log_wait) -> None:
        config = self._config
        old_rows = config.source.old_rows
        fail_blocked(tables, inspect_coverage(self._address, config.publication, tables.capturable, old_rows=old_rows))
        _, added = self._ensure_capture(tables.capturable, on_wait)
        fail_unpublished(tables, added, describe)
        with connect(self._address) as connection:
            found = inspect_memberships(connection, config.publication, tables.owners)
            recorded = load_memberships(config.state)
            # A table that left the publication and came back looks as if it had always been there.
            joined = fail_rejoined(tables, recorded, found, describe)
            save_memberships(config.state, joined if is_alone else {**recorded, **joined})
            check_log(connection, config, tables, describe, is_alone=is_alone)

    @override
    def departures(self, connection: Connection, tables: Iterable[TableName]) -> dict[TableName, str]:
        tables = list(tables)
        return departures(load_memberships(self._config.state), inspect_memberships(connection, self.publication, tables), tables)

    @override
    def misfits(self, connection: Connection, tables: Iterable[TableName]) -> dict[TableName, PenstockError]:
        mismatches = inspect_partition_identities(connection, list(tables), old_rows=self._config.source.old_rows)
        return {table: blocked([blocker]) for blocker in partition_blockers(mismatches) for table in blocker.tables}

    @override
    def renew(self, tables: Sequence[TableName]) -> Mapping[TableName, str]:
        self._ensure_capture(tables)
        with connect(self._address) as connection:
            return inspect_memberships(connection, self.publication, tables)

    def _ensure_capture(self, tables: Sequence[TableName], on_wait: OnWait = log_wait) -> tuple[Slot, list[TableName]]:
        source = self._config.source
        return ensure_capture(
            self._address, self.slot, self.publication, tables, failover=source.failover, old_rows=source.old_rows, on_wait=on_wait
        )

    @override
    def leave(self, tables: Collection[TableName]) -> None:
        if self._config.owns_publication:
            with connect(self._address) as connection:
                for table in tables:
                    drop_table(connection, self._config.publication, table)


class PollingSide(CaptureSide):
    """Where polling goes on, in the state directory or in the source."""

    def __init__(self, config: PipelineConfig, settings: PollingSettings) -> None:
        super().__init__(config)
        self._settings = settings

    @property
    @override
    def is_by_looks(self) -> bool:
        return True

    @property
    @override
    def export(self) -> Export:
        return CopyExport(self._settings)

    @override
    def goal(self, connection: Connection) -> Position:
        """Beyond every look so far: the last may have missed what was about to become visible."""
        flush_log(connection)
        return current_position(connection)

    @override
    def check_origin(self, connection: Connection, tables: Tables, last: Epoch | None, system: SystemIdentity) -> None:
        """Another timeline is no matter: tables are read anew then."""
        if last is not None:
            check_same_system(system, SystemIdentity.parse(last.system))

    @override
    def ensure(self, tables: Tables, describe: Describe, *, is_alone: bool, on_wait: OnWait = log_wait) -> None:
        mark = self._settings.resume.load_mark()
        if mark is None and tables.filled:
            raise SlotMissingError(
                "where polling is to go on is lost: what changed since the targets were last updated cannot be told any more",
                hint=f"restore {self._settings.rules.resume or 'penstock.polling in the source'}, or remove {self._config.sink.root} and "
                f"{self._config.state}, and run again to copy the tables anew",
            )
        self._fail_unfit(tables)
        added = self._begin(tables.capturable)
        if mark is not None:
            fail_unpublished(tables, added, describe)
            fail_over_holes(tables, SpoolReader(self._config.spool).extent, mark.position, self._settings.name, describe, is_alone=is_alone)

    @override
    def renew(self, tables: Sequence[TableName]) -> Mapping[TableName, str]:
        self._begin(tables)
        return {}

    @override
    def leave(self, tables: Collection[TableName]) -> None:
        with connect(self._address) as connection:
            found = find_tables(connection, tables)
        self._settings.resume.remove_tables([table.oid for table in found])

    def _fail_unfit(self, tables: Tables) -> None:
        """Tables that cannot be asked. If that is so for all of them, nothing starts."""
        with connect(self._address) as connection:
            refused = inspect_polled(connection, self._settings, find_tables(connection, tables.capturable)).refused
        if refused.keys() >= set(tables.capturable):
            raise next(iter(refused.values()))
        owners = tables.owners
        for source, error in refused.items():
            name = owners.get(source, source)
            tables.statuses[name] = TableStatus.failed(error, tables.statuses[name].applied)

    def _begin(self, tables: Sequence[TableName]) -> list[TableName]:
        """Have these asked from now on; gives those that were not."""
        feed = PollingFeed(replace(self._settings, tables=tuple(tables)))
        if self._settings.resume.load_mark() is not None:
            return feed.add(tables)
        feed.ensure()
        return list(tables)


def side_of(config: PipelineConfig) -> CaptureSide:
    if config.source.capture == "trigger":
        from penstock.pipeline.trigger_side import TriggerSide

        return TriggerSide(config)
    polling = polling_settings(config.capture_settings())
    return WalSide(config) if polling is None else PollingSide(config, polling)


def check_fit(config: PipelineConfig, connection: Connection) -> None:
    """Raise unless the server has what the capture needs, whatever tables there are."""
    if config.source.capture == "wal":
        check_server(inspect_server(connection))


def begins_at(config: PipelineConfig, connection: Connection) -> Position:
    """After which position the source can still give everything; zero if nothing has begun."""
    if config.source.capture == "trigger":
        return inspect_begin(connection, config.slot)
    polling = polling_settings(config.capture_settings())
    if polling is None:
        slot = inspect_slot(connection, config.slot)
        return slot.confirmed if slot is not None else Position.ZERO
    mark = polling.resume.load_mark()
    return mark.position if mark is not None else Position.ZERO
