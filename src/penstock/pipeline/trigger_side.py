"""What a pipeline asks of a source that is captured by triggers: `CaptureSide`, answered by the change table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from typing_extensions import override

from penstock.capture.continuity import check_same_system
from penstock.capture.provision import check_coverage
from penstock.capture.trigger_provision import ensure_coverage, inspect_coverage
from penstock.errors import ChangeTableMissingError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import Epoch
from penstock.pipeline.membership import fail_rejoined, load_memberships, save_memberships
from penstock.pipeline.sides import CaptureSide, Describe
from penstock.pipeline.tables import Tables, fail_blocked, fail_over_holes, fail_unpublished
from penstock.position import Position
from penstock.postgres.capture_triggers import detach, has_change_table, inspect_acts
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.change_table import ChangeTable, check_reader, export_fence
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

    @property
    @override
    def export(self) -> Export:
        return self._export

    @override
    def goal(self, connection: Connection) -> Position:
        """What has committed by now is put into order, and nothing of it after this position."""
        if not self._is_there(connection):
            return super().goal(connection)
        return ChangeTable(connection, self._name).sequence()

    @override
    def seen(self, connection: Connection) -> Position:
        """Commits that are yet to be put into order come at positions beyond the log of now, however long ago they were made."""
        if not self._is_there(connection):
            return super().seen(connection)
        return ChangeTable(connection, self._name).sequence()

    @override
    def check_origin(self, connection: Connection, tables: Tables, last: Epoch | None, system: SystemIdentity) -> None:
        """Another timeline is let pass if the change table, which went along, knows of everything that the targets have."""
        if last is None:
            return
        check_same_system(system, SystemIdentity.parse(last.system))
        if self._is_there(connection):
            state = ChangeTable(connection, self._name).inspect()
            check_reader(state, max(last.position, state.confirmed), self._name)

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
        recorded = load_memberships(config.state)
        # A table that lost its triggers and has them again looks as if it had always had them.
        joined = fail_rejoined(tables, recorded, found, describe)
        save_memberships(config.state, joined if is_alone else {**recorded, **joined})
        fail_over_holes(tables, SpoolReader(config.spool).extent, confirmed, self._name, describe, is_alone=is_alone)

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
        return export_fence(address, self._name)

    def _is_there(self, connection: Connection) -> bool:
        return has_change_table(connection, self._name)
