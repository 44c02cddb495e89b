"""How far a capture is behind its source, in bytes, in seconds and in WAL that the server keeps for it; and who holds it up.

Values only: sampled in `postgres`, put together in `capture`, shown to other processes through the spool's status.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from penstock.errors import SlotUnreservedError

_STRAINED = {"extended": "the slot keeps more WAL than max_wal_size", "lost": "the slot has been invalidated"}


def unreserved_slot(wal_status: str | None, name: str) -> SlotUnreservedError | None:
    """What is to be said of a slot in this state; None while it is in no such danger."""
    if wal_status != "unreserved":
        return None
    return SlotUnreservedError(
        f"{name} holds back more WAL than max_slot_wal_keep_size: the next checkpoint may remove what it still needs, and invalidate it",
        hint="let its reader catch up at once, and until it has: ALTER SYSTEM SET max_slot_wal_keep_size = -1; SELECT pg_reload_conf();",
    )


def describe_strain(wal_status: str | None, safe_wal_bytes: int | None, name: str) -> str | None:
    """What is to be said of the WAL that a slot keeps; None while there is nothing."""
    danger = unreserved_slot(wal_status, name)
    if danger is not None:
        return f"{danger.code}: {danger.message}; fix: {danger.hint}"
    if wal_status not in _STRAINED:
        return None
    room = f", {safe_wal_bytes} bytes may still be written" if safe_wal_bytes is not None else ""
    return f"wal_status is {wal_status}: {_STRAINED[wal_status]}{room}"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that has not ended; `pid` is None for a prepared one, which `name` then names."""

    pid: int | None
    name: str
    """The application's, or the prepared transaction's own."""
    database: str
    state: str
    age_seconds: float | None

    def describe(self) -> str:
        who = f"prepared transaction {self.name!r}" if self.pid is None else f"process {self.pid} ({self.name or 'no application name'})"
        age = f", open for {self.age_seconds:.0f} s" if self.age_seconds is not None else ""
        return f"{who} in {self.database}{age}, {self.state}"

    @property
    def remedy(self) -> str:
        """The statement that ends it; a prepared one's in its own database."""
        if self.pid is not None:
            return f"SELECT pg_terminate_backend({self.pid});"
        escaped = self.name.replace("'", "''")
        return f"ROLLBACK PREPARED '{escaped}';"


@dataclass(frozen=True, slots=True)
class CaptureLag:
    """One look at the server, a few seconds old at most while it can be reached."""

    sampled_at: datetime
    behind_bytes: int
    """From what is sealed to where the server's log ended."""
    behind_seconds: float | None
    """Since the commit up to which everything is sealed; 0 when nothing is waiting, None before the first commit."""
    retained_bytes: int | None
    """WAL that the server keeps for the slot; None if there is no slot."""
    safe_wal_bytes: int | None
    """How much may still be written before the slot is in danger; None if the server has set no limit."""
    wal_status: str | None
    catalog_xmin_age: int | None
    """How many transactions ago the slot's catalog horizon lies: dead catalog rows since then cannot be removed."""
    oldest_xmin_age: int | None
    """The same for the oldest snapshot that any session holds."""
    holders: tuple[OpenTransaction, ...] = ()
    """Transactions open for long, the oldest first: the slot's restart point stays behind them."""

    def __post_init__(self) -> None:
        if self.sampled_at.tzinfo is None:
            raise ValueError("sampled_at needs a time zone")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should look at before it becomes an error."""
        strain = describe_strain(self.wal_status, self.safe_wal_bytes, "the slot")
        return (*([strain] if strain is not None else []), *self.held_up)

    @property
    def held_up(self) -> tuple[str, ...]:
        return tuple(f"held up by {each.describe()}" for each in self.holders)
