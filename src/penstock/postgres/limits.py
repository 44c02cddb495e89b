"""The server's limits on slots, senders and WAL, and how much of them is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError, SenderLimitError, SlotLimitError
from penstock.postgres.connection import Connection
from penstock.postgres.queries import query


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings and what is used of them. None where the server has no such setting, or no limit."""

    version: str
    version_number: int
    max_slots: int
    used_slots: int
    max_senders: int
    used_senders: int
    wal_keep_mb: int | None
    """How much WAL a slot may keep back; -1: as much as the disk holds."""
    sender_timeout_ms: int | None
    decoding_memory_kb: int | None
    idle_slot_timeout: int | None


def inspect_limits(connection: Connection) -> Limits:
    row: Any = connection.execute(query("privileges", "limits")).fetchone()
    return Limits(*row)


def room_faults(limits: Limits, *, has_slot: bool) -> Iterator[PenstockError]:
    """What the server has too little of. A run needs its own slot, and a second one while it copies tables; each with a sender."""
    slots, senders = 2 - has_slot, 2
    if limits.max_slots - limits.used_slots < slots:
        yield SlotLimitError(
            f"{limits.used_slots} of {limits.max_slots} replication slots are taken, and {slots} more are needed",
            hint=f"ALTER SYSTEM SET max_replication_slots = {limits.used_slots + slots}; then restart the server",
        )
    if limits.max_senders - limits.used_senders < senders:
        yield SenderLimitError(
            f"{limits.used_senders} of {limits.max_senders} WAL senders are taken, and {senders} are needed",
            hint=f"ALTER SYSTEM SET max_wal_senders = {limits.used_senders + senders}; then restart the server",
        )
