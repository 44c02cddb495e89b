"""Telling a hole from quiet: can a reader at one position go on without missing a change?"""

from __future__ import annotations

from penstock.errors import PositionGapError
from penstock.position import Position


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
        f"slot {slot} begins at {confirmed}, but the targets hold only what commits up to {needed}: "
        f"the {confirmed - needed} bytes of WAL in between cannot be had any more",
        hint="remove the target tables, their penstock_epochs and the state directory, and run again to copy them anew",
    )
