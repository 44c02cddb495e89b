"""Everything that can be wrong with the source, found before the first row.

The order is that of how much an answer explains: another server first, then the slot itself, then whether it still holds what is needed,
whether there is a publication that says what it gives, and last whether somebody else is reading it just now, the one thing that passes
by itself.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from penstock.capture.continuity import check_continuity, check_not_rewound, check_system
from penstock.capture.membership import check_publication
from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureSettings
from penstock.errors import SlotMissingError
from penstock.position import Position
from penstock.postgres.catalog import inspect_types, load_types
from penstock.postgres.connection import Connection, connect
from penstock.postgres.slot import (
    COPY_ANEW,
    OnWait,
    Slot,
    check_failover,
    check_idle,
    check_server,
    check_slot,
    current_position,
    ensure_slot,
    inspect_server,
    inspect_slot,
)
from penstock.postgres.timeline import SystemIdentity, identify_system
from penstock.postgres.types.resolver import TypeResolver
from penstock.spool.consumers import minimum, released
from penstock.spool.history import SchemaHistory
from penstock.spool.identity import load_identity
from penstock.spool.reader import SpoolReader


class Source(NamedTuple):
    """A source that may be captured from."""

    system: SystemIdentity
    slot: Slot
    start: Position
    """Where the capture goes on."""
    keys: dict[int, tuple[str, ...]]
    """Those that tables had there."""
    types: TypeResolver


def inspect_source(settings: CaptureSettings, reader: SpoolReader, on_wait: OnWait) -> Source:
    """Raise the error that names what is wrong, if anything is. Creates publication and slot if nothing was ever captured from them."""
    with connect(settings.address) as connection:
        server = inspect_server(connection)
        check_server(server)
        check_failover(settings.failover, server.version)
        system = identify_system(settings.address)
        slot = inspect_slot(connection, settings.slot)
        _check_history(connection, settings, reader, system, slot)
        slot = slot or _ensure_first(settings, on_wait)
        check_slot(slot, server.database)
        _check_ground(settings, reader, slot)
        check_publication(connection, settings)
        check_idle(slot)
        if settings.failover and not slot.failover:
            slot = ensure_slot(settings.address, connection, settings.slot, failover=True)
        types = TypeResolver(settings.types, inspect_types(connection), partial(load_types, settings.address))
        start = max(reader.end or Position.ZERO, slot.confirmed)
        return Source(system, slot, start, SchemaHistory.load(settings.spool).keys(start), types)


def _check_history(
    connection: Connection, settings: CaptureSettings, reader: SpoolReader, system: SystemIdentity, slot: Slot | None
) -> None:
    before = load_identity(settings.spool)
    if before is None:
        return
    held = max(reader.end or Position.ZERO, *released(settings.spool).values(), Position.ZERO)
    known = SystemIdentity(before.system_identifier, before.timeline)
    check_system(settings.address, system, known, held, slot=slot, name=settings.slot)
    check_not_rewound(held, current_position(connection))


def _ensure_first(settings: CaptureSettings, on_wait: OnWait) -> Slot:
    """A slot that is not there is created only where none can have been before."""
    if load_identity(settings.spool) is not None or not settings.tables:
        raise SlotMissingError(
            f"slot {settings.slot} is gone: what committed since it was last read cannot be had any more", hint=COPY_ANEW
        )
    slot, _ = ensure_capture(
        settings.address,
        settings.slot,
        settings.publication,
        settings.tables,
        failover=settings.failover,
        old_rows=settings.old_rows,
        on_wait=on_wait,
    )
    return slot


def _check_ground(settings: CaptureSettings, reader: SpoolReader, slot: Slot) -> None:
    """A consumer that has not begun needs the spool from its start, and so does one that is yet to come."""
    ground = reader.extent
    needed = minimum(settings.spool) or Position.ZERO
    if needed == Position.ZERO and ground is not None:
        needed = ground[0]
    if needed > Position.ZERO:
        check_continuity(needed, ground, slot.confirmed, settings.slot)
