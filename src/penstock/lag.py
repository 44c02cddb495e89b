"""Lag of a capture: bytes and seconds behind the source, WAL retained for the slot, and the long-running
transactions that keep the slot from advancing.

This module only defines values. The package `postgres` samples them, `capture` combines them, and the spool's
status file passes them to other processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from penstock.errors import SlotUnreservedError

_STRAINED = {"extended": "the slot keeps more WAL than max_wal_size", "lost": "the slot has been invalidated"}


def unreserved_slot(wal_status: str | None, name: str) -> SlotUnreservedError | None:
    """The error for a slot whose `wal_status` is `unreserved`; None for any other status."""
    if wal_status != "unreserved":
        return None
    return SlotUnreservedError(
        f"{name} retains more WAL than max_slot_wal_keep_size: the next checkpoint may remove WAL that the "
        "slot needs, and invalidate the slot",
        hint="let the reader of the slot catch up now; until it has caught up: ALTER SYSTEM "
        "SET max_slot_wal_keep_size = -1; SELECT pg_reload_conf();",
    )


def describe_strain(wal_status: str | None, safe_wal_bytes: int | None, name: str) -> str | None:
    """A warning about the WAL that a slot retains; None if its `wal_status` is normal."""
    danger = unreserved_slot(wal_status, name)
    if danger is not None:
        return f"{danger.code}: {danger.message}; fix: {danger.hint}"
    if wal_status not in _STRAINED:
        return None
    room = f"; it is safe for {safe_wal_bytes} more bytes of WAL" if safe_wal_bytes is not None else ""
    return f"wal_status is {wal_status}: {_STRAINED[wal_status]}{room}"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that has not ended.

    `pid` is None for a prepared transaction, and `name` then identifies it.
    """

    pid: int | None
    name: str
    """The name of the application, or of the prepared transaction."""
    database: str
    state: str
    age_seconds: float | None

    def describe(self) -> str:
        who = (
            f"prepared transaction {self.name!r}"
            if self.pid is None
            else f"process {self.pid} ({self.name or 'no application name'})"
        )
        age = f", open for {self.age_seconds:.0f} s" if self.age_seconds is not None else ""
        return f"{who} in {self.database}{age}, {self.state}"

    @property
    def remedy(self) -> str:
        """The SQL statement that ends the transaction. For a prepared transaction, run it in `database`."""
        if self.pid is not None:
            return f"SELECT pg_terminate_backend({self.pid});"
        escaped = self.name.replace("'", "''")
        return f"ROLLBACK PREPARED '{escaped}';"


@dataclass(frozen=True, slots=True)
class CaptureLag:
    """One sample from the server, a few seconds old at most while the server is reachable."""

    sampled_at: datetime
    behind_bytes: int
    """From the last sealed position to the end of the server's WAL."""
    behind_seconds: float | None
    """Age of the last sealed commit; 0 if nothing waits to be sealed, None before the first commit."""
    retained_bytes: int | None
    """WAL that the server retains for the slot; None if there is no slot."""
    safe_wal_bytes: int | None
    """WAL that may still be written before the slot is in danger; None if the server has no limit."""
    wal_status: str | None
    catalog_xmin_age: int | None
    """Age of the slot's catalog horizon in transactions.

    VACUUM cannot remove catalog rows that were deleted after this horizon.
    """
    oldest_xmin_age: int | None
    """Age of the oldest snapshot of any session, in transactions."""
    holders: tuple[OpenTransaction, ...] = ()
    """Long-running transactions, oldest first. The slot's restart point cannot advance past their start."""

    def __post_init__(self) -> None:
        if self.sampled_at.tzinfo is None:
            raise ValueError("sampled_at needs a time zone")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems that an operator should solve before they become errors."""
        strain = describe_strain(self.wal_status, self.safe_wal_bytes, "the slot")
        return (*([strain] if strain is not None else []), *self.held_up)

    @property
    def held_up(self) -> tuple[str, ...]:
        return tuple(f"held up by {each.describe()}" for each in self.holders)
