"""How a new query begins: which tables it reads, publication and slot for them, and whether a position can still be had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.capture.continuity import check_continuity
from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureSettings
from penstock.errors import ConfigError, NoTablesError, PenstockError, SlotMissingError, SpoolFormatError, SystemChangedError
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_tables
from penstock.postgres.connection import Connection, connect
from penstock.postgres.horizon import insert_position
from penstock.postgres.publication import inspect_publication, inspect_relations
from penstock.postgres.slot import COPY_ANEW, inspect_slot
from penstock.postgres.timeline import identify_system
from penstock.spark.offsets import ANEW
from penstock.spark.request import SourceRequest
from penstock.spool.consumers import forget, hold, released
from penstock.spool.identity import load_identity
from penstock.spool.lock import is_locked
from penstock.spool.reader import SpoolReader
from penstock.spool.status import load_status


def choose_tables(connection: Connection, request: SourceRequest) -> list[CatalogTable]:
    """The tables of now that the query reads, in name order."""
    found = [table for table in inspect_tables(connection) if request.choice.selects(table.name)]
    settings = request.capture()
    if not request.choice.patterns:
        relations = inspect_relations(connection, settings.publication, [table.name for table in found])
        published = {relation.name for relation in relations if relation.is_published}
        found = [table for table in found if table.name in published]
    if not found:
        raise _no_tables(connection, request, settings)
    return found


def ensure_source(request: SourceRequest) -> None:
    """Publication, then slot. A slot that is gone is not made anew where one has been read before: the capture then says what is lost."""
    settings = request.capture()
    with connect(settings.address) as connection:
        slot = inspect_slot(connection, settings.slot)
        tables = [table.name for table in choose_tables(connection, request)]
    if slot is not None or load_identity(settings.spool) is None:
        ensure_capture(
            settings.address, settings.slot, settings.publication, tables, failover=settings.failover, old_rows=settings.old_rows
        )


def check_owner(settings: CaptureSettings) -> bool:
    """Raise if the spool holds another source's changes than this query asks for; says whether it holds this one's, or nobody's yet.

    Before anything in it is read, released or planned. Only a capture that gets the spool's lock finds it out by itself, and a query that
    reads behind another's capture never does.
    """
    identity = load_identity(settings.spool)
    if identity is None:
        return False
    if (identity.slot, identity.publication) != (settings.slot, settings.publication):
        raise SpoolFormatError(
            f"the spool at {settings.spool} holds slot {identity.slot} by publication {identity.publication}, "
            f"not {settings.slot} by {settings.publication}",
            hint=f'to read it, add .option("slot", "{identity.slot}").option("publication", "{identity.publication}"); '
            'to capture by this query, name a spool of its own: .option("spool", …)',
        )
    system = identify_system(settings.address).identifier
    if system != identity.system_identifier:
        raise SystemChangedError(
            f"the spool at {settings.spool} holds changes of database system {identity.system_identifier}, "
            f"and {settings.address.describe()} is {system}",
            hint='point dsn at that system, or name a spool of this query\'s own: .option("spool", …)',
        )
    status = load_status(settings.spool) if is_locked(settings.spool) else None
    if status is not None and status.numeric not in (None, settings.types.numeric):
        raise ConfigError(
            f"the option 'numeric' is {settings.types.numeric}, and the capture into {settings.spool} writes {status.numeric}",
            hint=f'.option("numeric", "{status.numeric}"), as the query or process has it that captures',
        )
    return True


@contextmanager
def own_words(settings: CaptureSettings) -> Iterator[None]:
    """Say what to do in the words of a query, where the error comes from a capture that does not know whose it is."""
    try:
        yield
    except PenstockError as error:
        if error.hint is None or COPY_ANEW not in error.hint:
            raise
        words = f"drop slot {settings.slot}, if it is there, remove the spool at {settings.spool}, and {ANEW}"
        raise type(error)(error.message, hint=error.hint.replace(COPY_ANEW, words)) from error


def hold_from(settings: CaptureSettings, consumer: str, start: Position) -> None:
    """Have the spool and the slot keep what commits after `start`, or raise if that cannot be had any more.

    Also where an earlier query of the same consumer has released more. All of the spool, since `start` may lie inside a record; and before
    looking, since what was released is deleted at any moment.
    """
    before = released(settings.spool).get(consumer)
    hold(settings.spool, consumer, Position.ZERO)
    try:
        check_start(settings, start)
    except BaseException:
        if before is None:
            forget(settings.spool, consumer)
        else:
            hold(settings.spool, consumer, before)
        raise


def begin_now(settings: CaptureSettings) -> Position:
    """Call it when the slot is there."""
    with connect(settings.address) as connection:
        return insert_position(connection)


def check_start(settings: CaptureSettings, start: Position) -> None:
    """Raise unless every change after `start` can still be had."""
    with connect(settings.address) as connection:
        slot, server = inspect_slot(connection, settings.slot), insert_position(connection)
    if start > server:
        raise ConfigError(
            f"the option 'startingPosition' is {start}, and the server's log reaches only to {server}",
            hint="use now to begin at the end of the log",
        )
    if slot is None:
        raise SlotMissingError(
            f"nothing after {start} can be had: there is no slot {settings.slot}",
            hint="use snapshot or now, which make the slot, or name another one by the option slot",
        )
    spool = SpoolReader(settings.spool)
    ground = (spool.start, spool.end) if spool.start is not None and spool.end is not None else None
    check_continuity(start, ground, slot.confirmed, settings.slot)


def _no_tables(connection: Connection, request: SourceRequest, settings: CaptureSettings) -> NoTablesError:
    place = settings.address.describe()
    if request.choice.single is not None:
        return NoTablesError(f"there is no table {request.choice.single} in {place}", hint="check the option 'table'; case counts")
    if request.choice.patterns:
        return NoTablesError(f"no table in {place} is one of {request.choice}", hint="check the option 'tables'; case counts")
    if inspect_publication(connection, settings.publication) is None:
        return NoTablesError(
            f"neither table nor tables is given, and there is no publication {settings.publication} in {place}",
            hint='add .option("table", "public.orders"), .option("tables", "public.*"), or the name of a publication that is there',
        )
    return NoTablesError(f"the publication {settings.publication} in {place} holds no table", hint="add tables to it")
