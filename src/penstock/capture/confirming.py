"""What may be confirmed to the server: what the targets have, or what the spool has.

`applied` (the default) confirms what every consumer of the spool has released. `spooled` confirms what is sealed, and so on disk: the
server is rid of it sooner, and the spool becomes the only place that holds it until the targets do. With a limit on the WAL that the slot
may retain, `applied` gives way to `spooled` above it, and takes over again when the targets have caught up well below it. It does so only
while the targets are behind what is sealed: what a long transaction makes the slot retain is not the targets' doing, and stays either way.
"""

from __future__ import annotations

from enum import StrEnum

from penstock.position import Lsn, Position

RESUME_AT = 0.8
"""The part of the limit below which `applied` takes over again; so that it does not flutter around the limit."""


BEHIND_AT = 0.2
"""The part of the limit by which consumers must be behind what is sealed to be the reason for what is retained."""


class Confirm(StrEnum):
    APPLIED = "applied"
    SPOOLED = "spooled"


class ConfirmPolicy:
    """Decides what is confirmed; one for the life of a capture. It never decides that something is durable: its callers say so."""

    def __init__(self, configured: Confirm, max_retained_bytes: int | None) -> None:
        self._configured = configured
        self._max_retained_bytes = max_retained_bytes
        self._mode = configured

    @property
    def mode(self) -> Confirm:
        return self._mode

    @property
    def gives_way(self) -> bool:
        """Whether the limit has switched it over."""
        return self._mode is not self._configured

    def look(self, server: Position, restart: Lsn | None, released: Position | None, sealed: Position | None) -> bool:
        """Take note of a sample of the server; says whether the mode changed.

        What counts is what `applied` retains, or would retain: all from the slot's restart point or from what the consumers have released,
        whichever is further back. So it stays with `spooled` while the consumers are behind, although the slot itself is not any more.
        """
        if self._max_retained_bytes is None or self._configured is Confirm.SPOOLED:
            return False
        kept = [position for position in (restart, released.lsn if released is not None else None) if position is not None]
        if not kept:
            return False
        retained_bytes = server.lsn - min(kept)
        gained_bytes = (sealed or Position.ZERO).lsn - (released or Position.ZERO).lsn
        limit = self._max_retained_bytes * (RESUME_AT if self.gives_way else 1)
        margin = self._max_retained_bytes * BEHIND_AT * (RESUME_AT if self.gives_way else 1)
        mode = Confirm.SPOOLED if retained_bytes > limit and gained_bytes > margin else Confirm.APPLIED
        changed, self._mode = mode is not self._mode, mode
        return changed

    def confirmable(self, released: Position | None, sealed: Position | None) -> Position | None:
        """Up to where the server may be told to forget; None if it must keep everything. Both are durable, or None."""
        position = sealed if self._mode is Confirm.SPOOLED else released
        return position if position is not None and position > Position.ZERO else None
