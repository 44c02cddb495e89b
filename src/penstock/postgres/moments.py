"""One moment of the source, without replication: a snapshot of all tables, and the place in the log that stands for it.

The place is where the log was when the snapshot had been taken. It needs neither `wal_level = logical` nor a slot nor a right to replicate,
only goes up, and means the same to whoever asks later, whatever else is lost. By itself it says nothing about a commit that is in the
log and not yet visible; so moments are not compared with commits, only with each other. The processes of one capture take moments in
turn, under a lock outside of the database (`Turn`): the later moment has the later place, and sees all that the earlier one saw.

A server that crashes forgets the end of its log that had not reached the disk: commits that were visible, and numbers of transactions,
which it gives out again. So nothing that a moment shows is relied on before the log up to it is on disk (`ensure_flushed`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from psycopg import sql

from penstock.errors import LockWaitError, StandbyError
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


Turn: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Takes the lock under which the processes of one capture take moments, one at a time. Without comparisons none is needed."""


@contextmanager
def hold_moment(connection: Connection, tables: Sequence[TableName] = (), turn: Turn = nullcontext) -> Iterator[Moment]:
    """Read under one moment for the length of the block, in one read-only transaction of `connection`.

    `tables` are locked against being altered, emptied or rewritten, before the snapshot is taken: a table that is emptied after a snapshot
    looks empty to it too. Readers and writers of the tables need not wait. `LockWaitError` if another session has locked one of them.
    """
    with ExitStack() as held, _begun(connection, tables, turn, held):
        moment = _inspect_moment(connection)
        held.close()
        yield moment


@contextmanager
def hold_fence(
    connection: Connection, tables: Sequence[TableName] = (), keep: Keep | None = None, turn: Turn = nullcontext
) -> Iterator[Moment]:
    """As `hold_moment`, for copying: every other moment has an earlier place or a later one, and none is taken while `keep` runs."""
    with ExitStack() as held:
        held.enter_context(turn())
        flush_log(connection)
        with _begun(connection, tables, nullcontext, ExitStack()):
            moment = _inspect_moment(connection)
            if keep is not None:
                keep(connection, moment)
            # From within, and not on disk: enough for the next moment to have a later place, also if no session writes anything.
            nudge(connection)
            held.close()
            yield moment


@contextmanager
def export_moment(
    address: SourceAddress, _on_wait: OnWait = log_wait, keep: Keep | None = None, turn: Turn = nullcontext
) -> Iterator[ExportedSnapshot]:
    """As `export_snapshot`, without a slot: the fence is a moment. No transaction is waited for, so `_on_wait` is not called."""
    with (
        connect(address, "penstock snapshot") as connection,
        connect(address) as other,
        hold_fence(connection, keep=keep, turn=turn) as moment,
    ):
        row: Any = connection.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
        ensure_flushed(other, moment.position)
        yield ExportedSnapshot(row[0], moment.position)


@contextmanager
def _begun(connection: Connection, tables: Sequence[TableName], turn: Turn, held: ExitStack) -> Iterator[None]:
    """A transaction that is begun under the lock of moments, which is put into `held`: to be released once the snapshot is taken."""
    connection.execute(lock_patience())
    refuse_views(connection)
    try:
        _begin(connection, tables, turn, held)
        yield
        connection.execute("COMMIT")
    except BaseException:
        # Perhaps in the middle of a COPY; and there is nothing to commit.
        connection.close()
        raise


def _begin(connection: Connection, tables: Sequence[TableName], turn: Turn, held: ExitStack) -> None:
    """Lock all tables at once or none: waiting for one while holding another may end another session's ALTER as a deadlock."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        held.enter_context(turn())
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
            held.close()
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


def _inspect_moment(connection: Connection) -> Moment:
    row: Any = connection.execute(query("polling", "moment")).fetchone()
    return Moment(Position.parse(row[0]), row[1], row[2], row[3])
