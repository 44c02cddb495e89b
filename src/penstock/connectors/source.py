"""Facts that a connector reads from the server before it starts: identity, tables, schemas, and whether a
checkpoint can be resumed.

Every function opens its own connection and closes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.capture.settings import CaptureSettings
from penstock.capture.source_checks import check_continuity, check_not_rewound, check_system
from penstock.change import change_schema
from penstock.connectors.feed import CONSUMER, check_members
from penstock.connectors.progress import Offset, Progress, check_slot_of, checkpoint_system
from penstock.connectors.settings import ConnectorSettings
from penstock.contracts.connector import ConnectorConfig, SourceCheckpoint
from penstock.contracts.schemas import SchemaProvider
from penstock.errors import ConnectorError, NoTablesError, PenstockError, SlotMissingError, SpoolError
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_schemas, inspect_tables, require_tables
from penstock.postgres.connection import Connection, connect
from penstock.postgres.publication import inspect_relations
from penstock.postgres.server import SystemIdentity, identify_system
from penstock.postgres.slot import (
    COPY_AGAIN,
    check_server,
    check_slot,
    current_position,
    inspect_server,
    inspect_slot,
)
from penstock.schema import TableName, TableSchema
from penstock.spool.history import SchemaHistory
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import released_positions, set_released


class CapturedSchemas(SchemaProvider):
    """Schemas of the tables: those that the catalog had at one position, and later versions from the schema
    history of the spool.
    """

    def __init__(self, spool: Path, declared: Mapping[TableName, TableSchema], seen_at: Position) -> None:
        self._spool = spool
        self._declared = dict(declared)
        self._seen_at = seen_at

    @override
    def partitions(self) -> tuple[str, ...]:
        return tuple(sorted(str(name) for name in {*self._declared, *self._recorded()}))

    @override
    def schema_of(self, partition: str, offset: str | None = None) -> pa.Schema | None:
        """The schema at an offset. None for an offset before the first known schema of the table, because the
        catalog has only the current schema.
        """
        try:
            table = TableName.parse(partition)
            position = None if offset is None else Offset.parse(offset).position
        except ValueError as error:
            raise ConnectorError(
                f"invalid partition or offset: {error}",
                hint="name a partition of a batch, and an offset of a checkpoint",
            ) from error
        schema = self.table_schema(table, position)
        return None if schema is None else change_schema(schema)

    def table_schema(self, table: TableName, position: Position | None = None) -> TableSchema | None:
        declared = [(self._seen_at, self._declared[table])] if table in self._declared else []
        # At equal positions the schema from WAL takes precedence over the catalog: the sort is stable, and
        # the schemas from WAL come last.
        versions = sorted([*declared, *self._recorded().get(table, ())], key=lambda version: version[0])
        fitting = [schema for at, schema in versions if position is None or at <= position]
        return fitting[-1] if fitting else None

    def _recorded(self) -> dict[TableName, list[tuple[Position, TableSchema]]]:
        """Schemas from the schema history, by the table's name at that position. After a re-creation, several
        OIDs may have had the same name.
        """
        found: dict[TableName, list[tuple[Position, TableSchema]]] = {}
        for versions in SchemaHistory.load(self._spool).tables.values():
            for version in versions:
                found.setdefault(version.schema.name, []).append((version.position, version.schema))
        return found


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceView:
    """The source at one moment; empty before the first inspection."""

    system: SystemIdentity | None = None
    seen_at: Position = Position.ZERO
    schemas: Mapping[TableName, TableSchema] = field(default_factory=dict)

    @property
    def tables(self) -> tuple[TableName, ...]:
        return tuple(sorted(self.schemas))


def inspect_view(settings: ConnectorSettings) -> SourceView:
    """Inspect the server and the tables to capture. Raises an error if they cannot be captured."""
    capture = settings.capture
    with connect(capture.address) as connection:
        check_server(inspect_server(connection))
        # The position is read first: a schema that is newer than the position is correct for all later
        # changes.
        seen_at = current_position(connection)
        tables = _wanted(connection, settings)
        schemas = inspect_schemas(connection, tables, capture.types, capture.publication)
        return SourceView(identify_system(capture.address), seen_at, schemas)


def discover(properties: ConnectorConfig) -> SourceView:
    """`inspect_view` within a time limit and without errors: an empty view if it fails.

    Runs in a thread that is abandoned on timeout, because neither name resolution nor connecting can be
    cancelled.
    """
    found: list[SourceView] = []

    def inspect(settings: ConnectorSettings) -> None:
        with _log_errors():
            found.append(inspect_view(settings))

    with _log_errors():
        settings = ConnectorSettings.from_options(properties)
        inspecting = threading.Thread(target=inspect, args=(settings,), name="penstock-discover", daemon=True)
        inspecting.start()
        inspecting.join(settings.discover_seconds)
    return found[0] if found else SourceView()


@contextmanager
def _log_errors() -> Iterator[None]:
    """Log errors before `open`, which reports them later."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the contract leaves the schema empty on errors
        _log.info(
            "schema not discovered",
            extra={"error": error.code if isinstance(error, PenstockError) else type(error).__name__},
        )


def hold_position(
    capture: CaptureSettings, view: SourceView, checkpoint: SourceCheckpoint, progress: Progress
) -> Position:
    """Keep everything after the checkpoint, or raise an error with the reason why it is not available.

    Returns the acknowledged position. The position may move back, to an older checkpoint, but never forward:
    only the consumer knows whether all rows before the checkpoint are durable.
    """
    check_slot_of(checkpoint, capture.slot)
    before = checkpoint_system(checkpoint)
    with connect(capture.address) as connection:
        slot = inspect_slot(connection, capture.slot)
        if view.system is not None and before is not None:
            check_system(capture.address, view.system, before, progress.floor, slot=slot, name=capture.slot)
        check_not_rewound(progress.floor, current_position(connection))
        if slot is None:
            raise SlotMissingError(
                f"slot {capture.slot} no longer exists: changes after the checkpoint are lost",
                hint=COPY_AGAIN,
            )
        check_slot(slot, inspect_server(connection).database)
    check_continuity(progress.floor, SpoolReader(capture.spool).extent, slot.confirmed, capture.slot)
    check_members(capture, view.tables, progress.covering(view.tables, copies=False).followed)
    acknowledged = min(progress.floor, released_positions(capture.spool).get(CONSUMER, slot.confirmed))
    try:
        return set_released(capture.spool, CONSUMER, acknowledged)
    except OSError as error:
        raise SpoolError(f"the spool cannot be written: {error}") from error


def _wanted(connection: Connection, settings: ConnectorSettings) -> list[CatalogTable]:
    if settings.tables:
        return require_tables(connection, settings.tables)
    known = {table.name: table for table in inspect_tables(connection)}
    relations = inspect_relations(connection, settings.capture.publication, known)
    published = [known[relation.name] for relation in relations if relation.is_published]
    if not published:
        raise NoTablesError(
            f"publication {settings.capture.publication} does not exist or has no tables, and the option "
            "'tables' is not set",
            hint="name the tables in the option 'tables', or create the publication",
        )
    return published
