"""How the source is doing, from the slot's point of view: how far its log is, how much of it the slot keeps, and who holds it up.

A transaction that stays open holds up more than itself: no slot can be created past it, and a slot's restart point and catalog horizon stay
behind it, so the server keeps WAL and dead rows although everything before has long been confirmed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.lag import OpenTransaction
from penstock.position import Lsn, Position
from penstock.postgres.connection import Connection
from penstock.postgres.queries import query

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceSample:
    """One look at the server. `slot_…` are None when the slot is gone."""

    taken_at: datetime
    """By the server's clock."""
    flushed: Position
    slot_restart: Lsn | None
    wal_status: str | None
    safe_wal_bytes: int | None
    catalog_xmin_age: int | None
    """How many transactions ago the slot's catalog horizon lies: dead catalog rows since then cannot be removed."""
    oldest_xmin_age: int | None
    """The same for the oldest snapshot that any session holds."""
    holders: tuple[OpenTransaction, ...]
    """Transactions open for long, the oldest first."""


def inspect_health(connection: Connection, slot: str, long_seconds: float) -> SourceSample:
    """Two short queries over views; no table of the user's is touched."""
    row: Any = connection.execute(query("replication", "health"), {"slot": slot}).fetchone()
    taken_at, flushed, restart, wal_status, safe_wal_bytes, catalog_age, oldest_age = row
    rows: Any = connection.execute(query("replication", "open_transactions"), {"long_seconds": long_seconds}).fetchall()
    return SourceSample(
        taken_at,
        Position.parse(flushed),
        Lsn.parse(restart) if restart else None,
        wal_status,
        safe_wal_bytes,
        catalog_age,
        oldest_age,
        tuple(OpenTransaction(*each) for each in rows),
    )


def inspect_blockers(connection: Connection, pid: int) -> tuple[OpenTransaction, ...]:
    """The transactions for which server process `pid` waits now."""
    rows: Any = connection.execute(query("replication", "blockers"), {"pid": pid}).fetchall()
    return tuple(OpenTransaction(*each) for each in rows)


def log_wait(blockers: Sequence[OpenTransaction]) -> None:
    _log.warning("waiting for open transactions", extra={"transactions": [each.describe() for each in blockers]})
