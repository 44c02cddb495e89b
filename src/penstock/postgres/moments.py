"""One moment of the source, without replication: a snapshot of all tables, and the place in the log that stands for it.

The place is where the log was when the snapshot had been taken. It needs neither `wal_level = logical` nor a slot nor a right to replicate,
only goes up, and means the same to whoever asks later, whatever else is lost. By itself it says nothing about a commit that is in the
log and not yet visible; so moments are not compared with commits, only with each other. Everybody who takes one holds a lock of the
database while he does, and what comes later has the later place: an earlier moment sees no more than a later one.

A server that crashes forgets the end of its log that had not reached the disk: commits that were visible, and numbers of transactions,
which it gives out again. So nothing that a moment shows is relied on before the log up to it is on disk (`ensure_flushed`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

import psycopg
from psycopg import sql

from penstock.errors import LockWaitError, SlotBusyError, StandbyError
from penstock.position import Position
from penstock.postgres.chunks import reading
from penstock.postgres.connection import Connection, SourceAddress, connect, refuse_views
from penstock.postgres.exported import ExportedSnapshot
from penstock.postgres.health import log_wait
from penstock.postgres.outline import lock_patience
from penstock.postgres.queries import query
from penstock.postgres.slot import OnWait, nudge
from penstock.postgres.timeline import SystemIdentity
from penstock.schema import TableName

_PATIENCE_SECONDS = 10.0
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Moment:
    """What a transaction sees that was begun by `hold_moment`."""

    position: Position
    xmin: int
    """Every transaction before this one, in 64 bits, has ended."""
    xmax: int
    """No transaction from this one on had begun to write."""
    taken_at: datetime


Keep: TypeAlias = Callable[[Connection, Moment], None]
"""Keeps what there is at a moment, in its transaction."""


@contextmanager
def hold_moment(connection: Connection, tables: Sequence[TableName] = ()) -> Iterator[Moment]:
    """Read under one moment for the length of the block, in one read-only transaction of `connection`.

    `tables` are locked against being altered, emptied or rewritten, before the snapshot is taken: a table that is emptied after a snapshot
    looks empty to it too. Whoever reads and writes them is not kept waiting. `LockWaitError` if somebody has one of them to himself.
    """
    with _begun(connection, tables):
        moment = _inspect_moment(connection)
        connection.execute(query("polling", "unlock_moment"))
        yield moment


@contextmanager
def hold_fence(connection: Connection, tables: Sequence[TableName] = (), keep: Keep | None = None) -> Iterator[Moment]:
    """As `hold_moment`, for copying: every other moment has an earlier place or a later one, and none is taken while `keep` runs."""
    connection.execute(lock_patience())
    connection.execute(query("polling", "lock_moment"))
    flush_log(connection)
    with _begun(connection, tables):
        moment = _inspect_moment(connection)
        if keep is not None:
            keep(connection, moment)
        # From within, and not on disk: enough for whoever comes next to have a later place, also if nobody else writes anything.
        nudge(connection)
        for _ in range(2):
            connection.execute(query("polling", "unlock_moment"))
        yield moment


@contextmanager
def export_moment(address: SourceAddress, _on_wait: OnWait = log_wait, keep: Keep | None = None) -> Iterator[ExportedSnapshot]:
    """As `export_snapshot`, without a slot: the fence is a moment. Nothing is waited for, so nobody is told."""
    with connect(address, "penstock snapshot") as connection, connect(address) as other, hold_fence(connection, keep=keep) as moment:
        row: Any = connection.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
        ensure_flushed(other, moment.position)
        yield ExportedSnapshot(row[0], moment.position)


@contextmanager
def _begun(connection: Connection, tables: Sequence[TableName] = ()) -> Iterator[None]:
    """A transaction under the lock of moments, which is to be let go within it, once the snapshot is taken."""
    connection.execute(lock_patience())
    refuse_views(connection)
    try:
        _begin(connection, tables, time.monotonic() + _PATIENCE_SECONDS)
        yield
        connection.execute("COMMIT")
    except BaseException:
        # Perhaps in the middle of a COPY; and there is nothing to commit. The lock goes with the connection.
        connection.close()
        raise


def _begin(connection: Connection, tables: Sequence[TableName], deadline: float) -> None:
    """Have all tables at once or none: who waits for one while he holds another may end somebody's ALTER as a deadlock."""
    while True:
        connection.execute(query("polling", "lock_moment"))
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            for table in tables:
                with reading(table):  # which takes no snapshot yet
                    name = sql.Identifier(table.schema, table.name)
                    connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE NOWAIT").format(name))
        except LockWaitError:
            if time.monotonic() > deadline:
                raise
            connection.execute("ROLLBACK")
            connection.execute(query("polling", "unlock_moment"))
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def ensure_flushed(connection: Connection, position: Position) -> None:
    """See to it that a server which crashes after this still has everything up to `position`. Not within a transaction."""
    row: Any = connection.execute(query("polling", "is_flushed"), {"position": str(position)}).fetchone()
    if not row[0]:
        flush_log(connection)


def flush_log(connection: Connection) -> None:
    """Let the log go on, and reach the disk. Not within a transaction."""
    connection.execute(query("polling", "flush"))


def reached_position(connection: Connection) -> Position:
    """Where the log is now."""
    row: Any = connection.execute(query("polling", "position")).fetchone()
    return Position.parse(row[0])


def inspect_system(connection: Connection) -> SystemIdentity:
    """Which server this is, over a plain connection."""
    row: Any = connection.execute(query("polling", "system")).fetchone()
    identifier, timeline = row
    if timeline is None:
        raise StandbyError(
            "the server is a standby, which does not tell what is open on its primary",
            hint="point source.dsn at the primary; of several hosts, target_session_attrs=read-write in the dsn finds it",
        )
    return SystemIdentity(identifier, int(timeline, 16))


def hold_name(connection: Connection, name: str) -> None:
    """Be the only one who polls under this name, until the connection ends or `let_go` is called."""
    row: Any = connection.execute(query("polling", "hold_name"), {"name": name}).fetchone()
    if not row[0]:
        raise SlotBusyError(f"another process polls under the name {name}")


def let_go(connection: Connection) -> None:
    """Before a connection is closed, whatever state it is in: what comes next need not wait until the server has noticed."""
    if not connection.closed:
        with suppress(psycopg.Error):
            connection.execute(query("polling", "let_go"))


def _inspect_moment(connection: Connection) -> Moment:
    row: Any = connection.execute(query("polling", "moment")).fetchone()
    return Moment(Position.parse(row[0]), row[1], row[2], row[3])
