"""What a pipeline asks of a source that is captured by triggers: `CaptureSide`, answered by the change table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from typing_extensions import override

from penstock.capture.continuity import check_same_system
from penstock.capture.provision import check_coverage
from penstock.capture.trigger_provision import ensure_coverage, inspect_coverage
from penstock.errors import ChangeTableMissingError, SystemChangedError, UncheckedTimelineError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import Epoch
from penstock.pipeline.membership import departures, fail_rejoined, load_memberships, save_memberships
from penstock.pipeline.sides import CaptureSide, Describe
from penstock.pipeline.tables import Tables, fail_blocked, fail_over_holes, fail_unpublished
from penstock.position import Position
from penstock.postgres.capture_triggers import detach, has_change_table, inspect_acts, is_same_act
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.change_table import ChangeTable, TableState, check_reader, export_fence
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.exported import Export, ExportedSnapshot
from penstock.postgres.health import log_wait
from penstock.postgres.slot import COPY_ANEW, OnWait
from penstock.postgres.timeline import SystemIdentity
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader


class TriggerSide(CaptureSide):
    """The change table, in the schema that is called as a slot would be."""

    def __init__(self, config: PipelineConfig) -> None:
        super().__init__(config)
        self._name = config.slot
        self._copied: tuple[TableState, Position] | None = None
        """The last fence that was given out, and how the change table was then."""

    @property
    @override
    def export(self) -> Export:
        return self._export

    @override
    def goal(self, connection: Connection) -> Position | None:
        """What has committed by now is put into order, and nothing of it after this position."""
        if not self._is_there(connection):
            return super().goal(connection)
        return self._sequence(connection)

    @override
    def seen(self, connection: Connection) -> Position | None:
        """Commits that are yet to be put into order come at positions beyond the log of now, however long ago they were made."""
        if not self._is_there(connection):
            return super().seen(connection)
        return self._sequence(connection)

    @override
    def check_origin(self, connection: Connection, tables: Tables, last: Epoch | None, system: SystemIdentity) -> None:
        """Another timeline is let pass if the change table, which went along, knows of everything that targets and spool have."""
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
    def ensure(self, tables: Tables, describe: Describe, *, is_alone: bool, on_wait: OnWait = log_wait) -> None:
        config = self._config
        with connect(self._address) as connection:
            if tables.filled and not self._is_there(connection):
                raise ChangeTableMissingError(
                    f"the change table {self._name} is gone: what committed since it was last read cannot be had any more", hint=COPY_ANEW
                )
        fail_blocked(tables, inspect_coverage(self._address, self._name, tables.capturable))
        report = ensure_coverage(self._address, self._name, tables.capturable, manage=True)
        check_coverage(report)
        fail_unpublished(tables, sorted(report.missing), describe)
        with connect(self._address) as connection:
            found = inspect_acts(connection, self._name, tables.owners)
            confirmed = ChangeTable(connection, self._name).inspect().confirmed
        recorded = {
            name: found[name] if name in found and is_same_act(act, found[name]) else act
            for name, act in load_memberships(config.state).items()
        }
        # A table that lost its triggers and has them again looks as if it had always had them.
        joined = fail_rejoined(tables, recorded, found, describe)
        save_memberships(config.state, joined if is_alone else {**recorded, **joined})
        fail_over_holes(tables, SpoolReader(config.spool).extent, confirmed, self._name, describe, is_alone=is_alone)

    @override
    def departures(self, connection: Connection, tables: Iterable[TableName]) -> dict[TableName, str]:
        tables = list(tables)
        return departures(load_memberships(self._config.state), inspect_acts(connection, self._name, tables), tables, is_same_act)

    @override
    def renew(self, tables: Sequence[TableName]) -> Mapping[TableName, str]:
        check_coverage(ensure_coverage(self._address, self._name, tables, manage=True))
        with connect(self._address) as connection:
            return inspect_acts(connection, self._name, tables)

    @override
    def leave(self, tables: Collection[TableName]) -> None:
        """Their triggers go, unless other pipelines read the same change table."""
        if self._config.source.process == "embedded":
            with connect(self._address) as connection:
                detach(connection, self._name, tables)

    def _export(
        self, address: SourceAddress, _on_wait: OnWait = log_wait, _tables: Sequence[CatalogTable] = ()
    ) -> AbstractContextManager[ExportedSnapshot]:
        """Nothing is waited for."""
        return self._fenced(address)

    @contextmanager
    def _fenced(self, address: SourceAddress) -> Iterator[ExportedSnapshot]:
        """What was copied so far must be in the past of a server that was promoted meanwhile."""
        with export_fence(address, self._name) as exported:
            with connect(address) as connection:
                state = ChangeTable(connection, self._name).inspect()
            before, fence = self._copied or (state, Position.ZERO)
            if (before.timeline, before.inherited) != (state.timeline, state.inherited) and fence > state.inherited:
                raise SystemChangedError(
                    f"tables were copied as of {fence}, and the change table {self._name} knew only of changes up to {state.inherited} "
                    "when the server was promoted",
                    hint=COPY_ANEW,
                )
            self._copied = (state, exported.fence)
            yield exported

    def _sequence(self, connection: Connection) -> Position | None:
        with suppress(UncheckedTimelineError):
            return ChangeTable(connection, self._name).sequence()
        return None

    def _is_there(self, connection: Connection) -> bool:
        return has_change_table(connection, self._name)
