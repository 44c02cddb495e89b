"""One moment of the source, without replication: a snapshot of all tables, and the place in the log that stands for it.

The place is where the log was when the snapshot had been taken. It needs neither `wal_level = logical` nor a slot nor a right to replicate,
only goes up, and means the same to whoever asks later, whatever else is lost. By itself it says nothing about a commit that is in the
log and not yet visible; so moments are not compared with commits, only with each other. Everybody who takes one holds a lock of the
database while he does, and what comes later has the later place: an earlier moment sees no more than a later one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import sql

from penstock.position import Position
from penstock.postgres.chunks import reading
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.exported import ExportedSnapshot
from penstock.postgres.health import log_wait
from penstock.postgres.outline import lock_patience
from penstock.postgres.queries import query
from penstock.postgres.slot import OnWait, nudge
from penstock.postgres.timeline import SystemIdentity
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class Moment:
    """What a transaction sees that was begun by `hold_moment`."""

    position: Position
    xmin: int
    """Every transaction before this one, in 64 bits, has ended."""
    xmax: int
    """No transaction from this one on had begun to write."""
    taken_at: datetime


@contextmanager
def hold_moment(connection: Connection, tables: Sequence[TableName] = ()) -> Iterator[Moment]:
    """Read under one moment for the length of the block, in one read-only transaction of `connection`.

    `tables` are locked against being altered, emptied or rewritten, before the snapshot is taken: a table that is emptied after a snapshot
    looks empty to it too. Whoever reads and writes them is not kept waiting. `LockWaitError` if somebody has one of them to himself.
    """
    with _begun(connection):
        for table in tables:
            with reading(table):  # which takes no snapshot yet
                connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.Identifier(table.schema, table.name)))
        moment = _inspect_moment(connection)
        connection.execute(query("polling", "unlock_moment"))
        yield moment


@contextmanager
def export_moment(address: SourceAddress, _on_wait: OnWait = log_wait) -> Iterator[ExportedSnapshot]:
    """As `export_snapshot`, without a slot: the fence is a moment. Nothing is waited for, so nobody is told."""
    with connect(address, "penstock snapshot") as connection, connect(address) as other, _begun(connection):
        moment = _inspect_moment(connection)
        row: Any = connection.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
        # Whoever comes next has a later place, also if nobody else writes anything.
        nudge(other)
        connection.execute(query("polling", "unlock_moment"))
        yield ExportedSnapshot(row[0], moment.position)


@contextmanager
def _begun(connection: Connection) -> Iterator[None]:
    """A transaction under the lock of moments, which is to be let go within it, once the snapshot is taken."""
    connection.execute(lock_patience())
    connection.execute(query("polling", "lock_moment"))
    try:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield
        connection.execute("COMMIT")
    except BaseException:
        # Perhaps in the middle of a COPY; and there is nothing to commit. The lock goes with the connection.
        connection.close()
        raise


def reached_position(connection: Connection) -> Position:
    """Where the log is now."""
    row: Any = connection.execute(query("polling", "position")).fetchone()
    return Position.parse(row[0])


def inspect_system(connection: Connection) -> SystemIdentity:
    """Which server this is, over a plain connection."""
    row: Any = connection.execute(query("polling", "system")).fetchone()
    identifier, timeline, is_standby = row
    return SystemIdentity(identifier, int(timeline) if is_standby else int(timeline, 16))


def _inspect_moment(connection: Connection) -> Moment:
    row: Any = connection.execute(query("polling", "moment")).fetchone()
    return Moment(Position.parse(row[0]), row[1], row[2], row[3])
