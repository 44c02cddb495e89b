"""Telling a hole from quiet: can a reader at one position go on without missing a change?

Three questions, asked before the first row. Is it the same database system? Does its timeline share our log up to where we stand? And does
the slot still hold, or the spool bridge, everything after that?
"""

from __future__ import annotations

from penstock.errors import PositionGapError, SystemChangedError, TimelineChangedError
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.slot import COPY_ANEW, Slot
from penstock.postgres.timeline import SystemIdentity, inspect_switch


def check_continuity(needed: Position, spool: tuple[Position, Position] | None, confirmed: Position, slot: str) -> None:
    """Raise unless everything after `needed` can still be had.

    The server gives out what commits after `confirmed`; the spool holds the ground between its two positions. A reader is safe when the
    slot has not moved past it, or when the spool bridges the way from the reader to where the slot begins.
    """
    if confirmed <= needed:
        return
    if spool is not None and spool[0] <= needed and confirmed <= spool[1]:
        return
    raise PositionGapError(
        f"slot {slot} begins at {confirmed}, but its readers have only what commits up to {needed}: "
        f"the {confirmed - needed} bytes of WAL in between cannot be had any more",
        hint=COPY_ANEW,
    )


def check_system(
    address: SourceAddress, now: SystemIdentity, before: SystemIdentity, held: Position, *, slot: Slot | None, name: str
) -> None:
    """Raise unless the log of the server as it is `now` goes on from `held`, which was captured from it as it was `before`.

    A change of timeline is let pass only where three things are certain: everything held lies before the switch; the slot `name` is one
    that the primary kept in step on its standby (Postgres 17 and later), since any other may have lost catalog rows that decoding needs;
    and, as always, the slot is not past what is held, which `check_continuity` says.
    """
    if now == before:
        return
    check_same_system(now, before)
    switched = f"the server is on timeline {now.timeline}, and everything so far came from timeline {before.timeline}"
    switch = inspect_switch(address, now.timeline, before.timeline)
    if switch is None:
        raise TimelineChangedError(
            f"{switched}, which is no part of its history: it was restored to a time before that timeline began",
            hint=f"point source.dsn at the server that went on from timeline {before.timeline}, or {COPY_ANEW}",
        )
    if held.lsn > switch:
        raise TimelineChangedError(
            f"{switched}, which it left at {switch}: the {held.lsn - switch} bytes of WAL from there to {held} were captured, "
            "but the server lost them when it was promoted or restored",
            hint=f"{COPY_ANEW}; with synchronized_standby_slots on the primary, the capture never runs ahead of the standby",
        )
    if slot is None or not (slot.failover and slot.synced):
        state = "is not there" if slot is None else "was not kept in step by the primary"
        raise TimelineChangedError(
            f"{switched}; on the promoted server, slot {name} {state}, so changes up to the switch at {switch} may be missing",
            hint=f"{COPY_ANEW}; with source.failover: true and sync_replication_slots on the standby (Postgres 17 and later), the slot "
            "survives a promotion",
        )


def check_same_system(now: SystemIdentity, before: SystemIdentity) -> None:
    """Raise unless it is the same database system, be it on another timeline."""
    if now.identifier != before.identifier:
        raise SystemChangedError(
            f"the server is database system {now.identifier}, and everything so far came from {before.identifier}",
            hint=f"point source.dsn back at the old system, or {COPY_ANEW}",
        )


def check_not_rewound(held: Position, server: Position) -> None:
    """A server whose log ends before what was captured from it has been set back, be it on the same timeline."""
    if held > server:
        raise SystemChangedError(
            f"changes were captured up to {held}, and the server's log reaches only to {server}: it was restored to an earlier time",
            hint=COPY_ANEW,
        )
