"""Consistent reads without replication: a snapshot of all tables, and the WAL position of that snapshot. Also
the SQL condition for rows that were written after a snapshot.

The position is the WAL position right after the snapshot was taken. Reading it requires neither `wal_level =
logical` nor a slot nor the REPLICATION attribute. Later reads have later positions, even if Penstock's state
is lost between them. The position of a consistent read is compared only with those of other consistent reads.
It must not be compared with commit positions, since a commit may be in the WAL before it is visible. The
processes of one capture take consistent reads one at a time, under a lock outside of the database
(`PollLock`). So the read with the later position sees everything that the earlier read saw.

A server that crashes loses the end of its WAL that was not on disk. This may include commits that were
already visible, and transaction ids, which the server then assigns again. So the result of a read is used
only after the WAL up to its position is on disk (`ensure_flushed`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

import psycopg
from psycopg import sql

from penstock.errors import LockWaitError, SnapshotLostError, StandbyError
from penstock.position import Position
from penstock.postgres.chunks import reading
from penstock.postgres.connection import Connection, SourceAddress, connect, refuse_views
from penstock.postgres.queries import query
from penstock.postgres.server import SystemIdentity, log_wait
from penstock.postgres.slot import OnWait, nudge
from penstock.postgres.snapshot_export import ExportedSnapshot, session_lock_timeout
from penstock.schema import TableName

_PAGE_BYTES = 8192
_HEADER_BYTES = (24, 40)


def inspect_horizon(connection: Connection, snapshot: str) -> int:
    """Return the id of the oldest transaction that was open in the exported snapshot, reduced to 32 bits like
    the `xmin` of rows. Raises `SnapshotLostError` if the snapshot no longer exists.
    """
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
        except (psycopg.DataError, psycopg.ProgrammingError, psycopg.OperationalError) as error:
            raise SnapshotLostError("the exported snapshot no longer exists") from error
        row: Any = connection.execute(query("replication", "snapshot_xmin")).fetchone()
        return int(row[0])


def written_since(horizon: int) -> str:
    """Return the SQL condition that a row was written by the transaction `horizon`, by a later one, or by one
    so old that the comparison of transaction ids has wrapped around.
    """
    return (
        sql.SQL("pg_catalog.age(xmin) <= pg_catalog.age({}::pg_catalog.xid)")
        .format(sql.Literal(str(horizon)))
        .as_string()
    )


def inspect_filenodes(connection: Connection, oids: Collection[int]) -> dict[int, int]:
    """Return the current filenodes of these relations, by OID. Dropped relations are omitted."""
    rows: list[Any] = connection.execute(query("catalog", "filenodes"), {"oids": list(oids)}).fetchall()
    return {oid: filenode for oid, filenode, _ in rows}


def insert_position(connection: Connection) -> Position:
    """Return the position of the next WAL record. It is between two records, so every record is entirely
    before or after it.
    """
    row: Any = connection.execute(query("replication", "insert_lsn")).fetchone()
    return Position.parse(row[0])


def shown_position(connection: Connection) -> Position:
    """Return a position at or after all changes of other sessions that this connection has seen. The WAL of
    an idle server reaches this position too.
    """
    at = insert_position(connection).value
    # At the start of a page, the insert position is after the page header. But the header is written only
    # with the next record, so the WAL of an idle server ends before it.
    return Position.of(at - at % _PAGE_BYTES) if at % _PAGE_BYTES in _HEADER_BYTES else Position.of(at)


_LOCK_WAIT_SECONDS = 10.0
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ConsistentRead:
    """The snapshot of a transaction that `hold_consistent_read` or `hold_fence` began, and its position."""

    position: Position
    xmin: int
    """A transaction id in 64 bits. Every transaction with a lower id has ended."""
    xmax: int
    """The first transaction id, in 64 bits, that was not assigned yet."""
    taken_at: datetime


StoreRead: TypeAlias = Callable[[Connection, ConsistentRead], None]
"""Callback that stores data of a consistent read. Called within the transaction of the read."""


PollLock: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Context manager for the lock under which the processes of one capture take consistent reads, one at a time.
A lock is not needed if the positions of the reads are not compared.
"""


@contextmanager
def hold_consistent_read(
    connection: Connection, tables: Sequence[TableName] = (), lock: PollLock = nullcontext
) -> Iterator[ConsistentRead]:
    """Hold one snapshot for the length of the block, in a read-only transaction of `connection`. `tables` are
    locked against ALTER, TRUNCATE and rewrites before the snapshot is taken, since a table that is truncated
    afterwards looks empty under the snapshot. Readers and writers of the tables do not wait. Raises
    `LockWaitError` if another session keeps one of them locked against reading.
    """
    with ExitStack() as held, _begun(connection, tables, lock, held):
        read = _inspect_read(connection)
        held.close()
        yield read


@contextmanager
def hold_fence(
    connection: Connection,
    tables: Sequence[TableName] = (),
    store: StoreRead | None = None,
    lock: PollLock = nullcontext,
) -> Iterator[ConsistentRead]:
    """As `hold_consistent_read`, for snapshots of tables: no other consistent read has the same position, and
    none is taken while `store` runs.
    """
    with ExitStack() as held:
        held.enter_context(lock())
        flush_log(connection)
        with _begun(connection, tables, nullcontext, ExitStack()):
            read = _inspect_read(connection)
            if store is not None:
                store(connection, read)
            # Write a WAL record, so that the next read has a later position even on an idle server. The
            # record need not be flushed for this.
            nudge(connection)
            held.close()
            yield read


@contextmanager
def export_consistent_read(
    address: SourceAddress,
    _on_wait: OnWait = log_wait,
    store: StoreRead | None = None,
    lock: PollLock = nullcontext,
) -> Iterator[ExportedSnapshot]:
    """As `export_snapshot`, without a slot: the fence is the position of a consistent read. It does not wait
    for open transactions, so `_on_wait` is not called.
    """
    with (
        connect(address, "penstock snapshot") as connection,
        connect(address) as other,
        hold_fence(connection, store=store, lock=lock) as read,
    ):
        row: Any = connection.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
        ensure_flushed(other, read.position)
        yield ExportedSnapshot(row[0], read.position)


@contextmanager
def _begun(
    connection: Connection, tables: Sequence[TableName], lock: PollLock, held: ExitStack
) -> Iterator[None]:
    """Context manager for a transaction that is begun under the poll lock. The lock is added to `held`; the
    caller closes `held` after taking the snapshot.
    """
    connection.execute(session_lock_timeout())
    refuse_views(connection)
    try:
        _begin(connection, tables, lock, held)
        yield
        connection.execute("COMMIT")
    except BaseException:
        # The connection may be in the middle of a COPY, and there is nothing to commit.
        connection.close()
        raise


def _begin(connection: Connection, tables: Sequence[TableName], lock: PollLock, held: ExitStack) -> None:
    """Begin a transaction and lock all tables without waiting; if a table is locked by another session, try
    again until a deadline. Waiting for one table while holding another could make another session's ALTER
    fail with a deadlock.
    """
    deadline = time.monotonic() + _LOCK_WAIT_SECONDS
    while True:
        held.enter_context(lock())
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            for table in tables:
                with reading(table):  # takes no snapshot yet
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
    """Flush the WAL up to `position` to disk, so that a crash does not lose it. Must not be called within a
    transaction.
    """
    row: Any = connection.execute(query("polling", "is_flushed"), {"position": str(position)}).fetchone()
    if not row[0]:
        flush_log(connection)


def flush_log(connection: Connection) -> None:
    """Advance the WAL and flush it to disk. Must not be called within a transaction."""
    connection.execute(query("polling", "flush"))


def wal_position(connection: Connection) -> Position:
    """Return the current WAL position."""
    row: Any = connection.execute(query("polling", "position")).fetchone()
    return Position.parse(row[0])


def inspect_system(connection: Connection) -> SystemIdentity:
    """Return the identity of the server, queried over a plain connection."""
    row: Any = connection.execute(query("polling", "system")).fetchone()
    identifier, timeline = row
    if timeline is None:
        raise StandbyError(
            "the server is a standby, which does not report open transactions of its primary",
            hint="point source.dsn at the primary; in a dsn with several hosts, "
            "target_session_attrs=read-write selects it",
        )
    return SystemIdentity(identifier, int(timeline, 16))


def _inspect_read(connection: Connection) -> ConsistentRead:
    row: Any = connection.execute(query("polling", "consistent_read")).fetchone()
    return ConsistentRead(Position.parse(row[0]), row[1], row[2], row[3])
