"""What a connector asks of the server before it reads: who it is, which tables there are, and whether a place in its log still holds.

Everything here opens a connection of its own and closes it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.capture.continuity import check_continuity, check_not_rewound, check_system
from penstock.capture.settings import CaptureSettings
from penstock.connectors.feed import CONSUMER
from penstock.connectors.progress import Progress, check_slot_of, checkpoint_system
from penstock.connectors.readiness import check_members
from penstock.connectors.settings import ConnectorSettings
from penstock.contracts.connector import ConnectorConfig, SourceCheckpoint
from penstock.errors import NoTablesError, PenstockError, SlotMissingError, SpoolError
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_schemas, inspect_tables
from penstock.postgres.connection import Connection, connect
from penstock.postgres.publication import inspect_relations
from penstock.postgres.slot import COPY_ANEW, check_server, check_slot, current_position, inspect_server, inspect_slot
from penstock.postgres.timeline import SystemIdentity, identify_system
from penstock.schema import TableName, TableSchema
from penstock.spool.consumers import hold, released
from penstock.spool.reader import SpoolReader

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceView:
    """The source at one moment; empty while nobody has looked."""

    system: SystemIdentity | None = None
    seen_at: Position = Position.ZERO
    schemas: Mapping[TableName, TableSchema] = field(default_factory=dict)

    @property
    def tables(self) -> tuple[TableName, ...]:
        return tuple(sorted(self.schemas))


def inspect_view(settings: ConnectorSettings) -> SourceView:
    """Look at the server and at the tables that the connector is to capture. Raises what stands in the way."""
    capture = settings.capture
    with connect(capture.address) as connection:
        check_server(inspect_server(connection))
        # First: a shape that is newer than this place is still right for all that comes after.
        seen_at = current_position(connection)
        tables = _wanted(connection, settings)
        schemas = inspect_schemas(connection, tables, capture.types, capture.publication)
        return SourceView(identify_system(capture.address), seen_at, schemas)


def discover(properties: ConnectorConfig) -> SourceView:
    """The same, within a time limit and without a word: an empty view if anything is in the way.

    In a thread that is left behind when it takes too long: neither name resolution nor a connection that is being made can be given up.
    """
    found: list[SourceView] = []

    def look(settings: ConnectorSettings) -> None:
        with _silence():
            found.append(inspect_view(settings))

    with _silence():
        settings = ConnectorSettings.from_options(properties)
        looking = threading.Thread(target=look, args=(settings,), name="penstock-discover", daemon=True)
        looking.start()
        looking.join(settings.discover_seconds)
    return found[0] if found else SourceView()


@contextmanager
def _silence() -> Iterator[None]:
    """Whatever goes wrong while nobody has opened the connector yet, `open` will say."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - what is found out is left empty, as the contract has it
        _log.info("schema not discovered", extra={"error": error.code if isinstance(error, PenstockError) else type(error).__name__})


def hold_place(capture: CaptureSettings, view: SourceView, checkpoint: SourceCheckpoint, progress: Progress) -> Position:
    """See to it that everything after the checkpoint is kept, or raise the error that says why it cannot be had.

    Gives what has been acknowledged by now. That may go back, to a checkpoint that is older, and never goes forward: whether everything
    before the checkpoint is durable, only the consumer can say.
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
                f"slot {capture.slot} is gone: what committed since the checkpoint cannot be had any more", hint=COPY_ANEW
            )
        check_slot(slot, inspect_server(connection).database)
    check_continuity(progress.floor, SpoolReader(capture.spool).extent, slot.confirmed, capture.slot)
    check_members(capture, view.tables, progress.covering(view.tables, copies=False).followed)
    acknowledged = min(progress.floor, released(capture.spool).get(CONSUMER, slot.confirmed))
    try:
        return hold(capture.spool, CONSUMER, acknowledged)
    except OSError as error:
        raise SpoolError(f"the spool cannot be written: {error}") from error


def _wanted(connection: Connection, settings: ConnectorSettings) -> list[CatalogTable]:
    known = {table.name: table for table in inspect_tables(connection)}
    if settings.tables:
        unknown = [table for table in settings.tables if table not in known]
        if unknown:
            raise NoTablesError(
                f"there is no table in the source that can be captured by the name {', '.join(map(str, unknown))}",
                hint="check the name; case counts, and a partition is part of its root",
            )
        return [known[table] for table in settings.tables]
    relations = inspect_relations(connection, settings.capture.publication, known)
    published = [known[relation.name] for relation in relations if relation.is_published]
    if not published:
        raise NoTablesError(
            f"publication {settings.capture.publication} is not there or holds no table, and none is asked for",
            hint="name the tables in the option 'tables', or create the publication",
        )
    return published
