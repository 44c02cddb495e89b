"""Read a table in chunks: block ranges of its heaps, under one exported snapshot, from any machine that can
connect to the source. Also detects partitions that were attached, detached, truncated or rewritten.

Ranges of ctid need no key. The last range of a heap has no upper bound, so that growth after planning does no
harm. A rewrite of the table (VACUUM FULL, CLUSTER, TRUNCATE) moves or hides rows; so each chunk compares the
relation's filenode with the planned one before and after reading. Rows are read by table name. Another
relation under that name, such as a view, could run its owner's functions with this role's rights. So the heap
is locked first, and its OID is compared.

If the publication publishes via the root, a TRUNCATE of a single partition is not in the log. It changes the
partition's filenode, as a rewrite does. But a rewrite keeps each row's xmin, while rows inserted after a
TRUNCATE have the xmin of a transaction that was still open at the TRUNCATE or began later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.pq import ExecStatus

from penstock.change import EXACT, EXACT_TYPE, REPLACED
from penstock.errors import (
    PenstockError,
    SnapshotLostError,
    TableRewrittenError,
    UnreadableTextError,
    UnrepresentableError,
)
from penstock.postgres.catalog import CatalogTable, inspect_names
from penstock.postgres.connection import (
    Connection,
    SourceAddress,
    connect,
    disable_conversion,
    refuse_views,
    translate,
)
from penstock.postgres.copy_text import read_texts
from penstock.postgres.queries import query
from penstock.postgres.snapshot_export import (
    CopyFingerprint,
    Leaf,
    MeasuredTable,
    inspect_leaves,
    inspect_row_filter,
    reader_name,
    session_lock_timeout,
)
from penstock.postgres.types.rows import DecodedRows, decode_rows
from penstock.schema import TableName, TableSchema

BLOCK_BYTES = 8192

OnRejected = Callable[[pa.RecordBatch, Sequence[PenstockError]], None]
"""Function that receives rejected rows, and the error of each."""

# SQLSTATEs of SET TRANSACTION SNAPSHOT for a snapshot that is no longer exported (two, by server version),
# and for one whose session has just ended.
_SNAPSHOT_GONE = frozenset({"22023", "42704", "55000"})

# A column, table or schema was dropped after planning, or was replaced by something that cannot be locked as
# a table.
_ALTERED = frozenset({"42703", "42P01", "42809", "3F000"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of blocks of one heap, which is `schema`'s table or one of its partitions. The range begins
    with block `first` and ends before block `last`, or at the end of the heap if `last` is None.
    """

    schema: TableSchema
    heap: TableName
    heap_oid: int
    filenode: int
    first: int
    last: int | None
    heap_bytes: int
    row_filter: str | None = None
    """The row filter of the publication, as the server prints it. Rows that do not meet it are not copied."""
    constants: tuple[tuple[str, str], ...] = ()
    """Columns that the heap does not have, each with the text that all its rows get. They follow the heap's
    columns.
    """

    def with_conditions(self, conditions: Iterable[str]) -> Chunk:
        """Return the same blocks, but only with the rows that also meet these SQL conditions."""
        own = [] if self.row_filter is None else [self.row_filter]
        filters = [sql.SQL("({})").format(sql.SQL(condition)) for condition in (*own, *conditions)]
        return replace(self, row_filter=sql.SQL(" AND ").join(filters).as_string() or None)


def plan_chunks(
    connection: Connection,
    table: CatalogTable,
    schema: TableSchema,
    chunk_bytes: int,
    publication: str | None,
) -> list[Chunk]:
    """Split a table into chunks of about `chunk_bytes` of heap, restricted to the rows that `publication`
    publishes. Call it after the snapshot.
    """
    row_filter = inspect_row_filter(connection, table.oid, publication)
    leaves, sizes = inspect_leaves(connection, table.oid)
    return _cut([_whole(schema, leaf, row_filter) for leaf in leaves], sizes, chunk_bytes)


def cut_chunks(table: MeasuredTable, chunk_bytes: int) -> list[Chunk]:
    """As `plan_chunks`, for a table that was measured after the snapshot."""
    return _cut(list(whole_leaves(table.outline).values()), table.leaf_bytes, chunk_bytes)


def whole_leaves(outline: CopyFingerprint) -> dict[int, Chunk]:
    """Return one chunk for each heap of a table, by OID of the heap. The chunk covers the whole heap."""
    return {
        leaf.oid: _whole(part.schema, leaf, part.row_filter, outline.constants(part))
        for part in outline.parts
        for leaf in part.leaves
    }


def _whole(
    schema: TableSchema, leaf: Leaf, row_filter: str | None, constants: tuple[tuple[str, str], ...] = ()
) -> Chunk:
    return Chunk(schema, leaf.name, leaf.oid, leaf.filenode, 0, None, 0, row_filter, constants)


def _cut(heaps: Sequence[Chunk], sizes: Mapping[int, int], chunk_bytes: int) -> list[Chunk]:
    """Split every heap separately, the largest first."""
    chunks = []
    step = max(1, chunk_bytes // BLOCK_BYTES)
    for heap in sorted(heaps, key=lambda heap: -sizes[heap.heap_oid]):
        blocks = sizes[heap.heap_oid] // BLOCK_BYTES
        starts = list(range(0, max(1, blocks), step))
        for index, first in enumerate(starts):
            last = None if index == len(starts) - 1 else first + step
            chunks.append(
                replace(
                    heap, first=first, last=last, heap_bytes=(min(first + step, blocks) - first) * BLOCK_BYTES
                )
            )
    return chunks


def snapshot_schema(schema: TableSchema) -> pa.Schema:
    """Return the Arrow schema of snapshot rows: the table's columns, then `_exact`."""
    return pa.schema(
        [
            *(pa.field(column.name, column.arrow_type) for column in schema.columns),
            pa.field(EXACT, EXACT_TYPE),
        ]
    )


def chunk_schema(chunk: Chunk) -> pa.Schema:
    """Return the schema of the batches that `read_chunk` yields."""
    return _extended(snapshot_schema(chunk.schema), chunk.constants)


def with_constants(batch: pa.RecordBatch, constants: Sequence[tuple[str, str]]) -> pa.RecordBatch:
    """Add columns with the same value in all rows, before `_exact`."""
    if not constants:
        return batch
    added = [pa.repeat(pa.scalar(text, pa.string()), batch.num_rows) for _, text in constants]
    columns = [*batch.columns[:-1], *added, batch.columns[-1]]
    return pa.RecordBatch.from_arrays(columns, schema=_extended(batch.schema, constants))


def _extended(schema: pa.Schema, constants: Sequence[tuple[str, str]]) -> pa.Schema:
    fields = list(schema)
    return pa.schema([*fields[:-1], *(pa.field(name, pa.string()) for name, _ in constants), fields[-1]])


def read_chunk(
    address: SourceAddress,
    snapshot: str | None,
    chunk: Chunk,
    *,
    reject_inexact: bool = False,
    on_rejected: OnRejected | None = None,
    session: Connection | None = None,
) -> Generator[pa.RecordBatch]:
    """Yield the rows of one chunk, decoded by the same decoder as the stream. Runs on executors; opens a
    connection unless a `session` is given. Without a snapshot, the chunk is read under a new one, which is
    not consistent with other chunks. With `reject_inexact`, a value that its type cannot hold is an error. If
    `on_rejected` is set, it receives rejected rows, which then raise no error.
    """
    with (
        open_snapshot(address, snapshot, chunk.heap)
        if session is None
        else nullcontext(session) as connection
    ):
        rows = _read(connection, chunk, reject_inexact=reject_inexact, on_rejected=on_rejected)
        yield from map(partial(with_constants, constants=chunk.constants), rows)


def probe_chunks(
    address: SourceAddress, snapshot: str, chunks: Sequence[Chunk]
) -> dict[TableName, PenstockError]:
    """Check whether the chunks can be read; returns the heaps that cannot, each with its error."""
    failures: dict[TableName, PenstockError] = {}
    waiting = list(chunks)
    while waiting:
        chunk = waiting[0]
        try:
            with open_snapshot(address, snapshot, chunk.heap) as connection:
                while waiting:
                    chunk = waiting.pop(0)
                    for _ in _read(connection, chunk, reject_inexact=False):
                        pass
        except PenstockError as error:
            failures[chunk.heap] = error
        if chunk in waiting:  # the connection failed
            return failures
    return failures


@contextmanager
def open_snapshot(address: SourceAddress, snapshot: str | None, table: TableName) -> Iterator[Connection]:
    """Context manager for a connection in a transaction under the snapshot, or under a new one if `snapshot`
    is None. `table` is named in the error if the snapshot no longer exists.
    """
    with connect(address, reader_name(snapshot)) as connection:
        try:
            with reading(table):
                refuse_views(connection)
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                if snapshot is not None:
                    _import_snapshot(connection, snapshot, table)
                connection.execute(session_lock_timeout())
                disable_conversion(connection)
            yield connection
        finally:
            # The connection may be in the middle of a COPY, and there is nothing to commit.
            connection.close()


@contextmanager
def lock_tables(address: SourceAddress, tables: Sequence[TableName]) -> Iterator[Connection]:
    """Context manager for a session whose transaction locks these tables (ACCESS SHARE), so that TRUNCATE and
    rewrites wait until the block ends. The lock is taken before the snapshot, which `begin_locked` imports.
    All reading must happen in this session: another session would queue behind a waiting TRUNCATE. Raises
    `LockWaitError` if another session holds a table exclusively.
    """
    with connect(address, reader_name(None)) as connection:
        try:
            with reading(tables[0]):
                connection.execute(session_lock_timeout())
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                names = sql.SQL(", ").join(sql.Identifier(table.schema, table.name) for table in tables)
                connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(names))
            yield connection
        finally:
            connection.close()


def begin_locked(connection: Connection, snapshot: str, table: TableName) -> None:
    """Import the snapshot into a session of `lock_tables`, before its first query."""
    with reading(table):
        _import_snapshot(connection, snapshot, table)
        disable_conversion(connection)


@contextmanager
def reading(table: TableName) -> Iterator[None]:
    """Translate the driver's errors that occur while `table` is read."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate in _ALTERED:
            raise TableRewrittenError(
                f"table {table} was altered while it was being read; its snapshot starts again"
            ) from None
        raise translate(error, f"reading {table}") from None


def _read(
    connection: Connection, chunk: Chunk, *, reject_inexact: bool, on_rejected: OnRejected | None = None
) -> Generator[pa.RecordBatch]:
    target = snapshot_schema(chunk.schema)

    def typed(texts: list[pa.StringArray]) -> pa.RecordBatch:
        rows = decode_rows(texts, chunk.schema)
        found = pa.RecordBatch.from_arrays([*rows.columns, rows.exact], schema=target)
        if on_rejected is not None:
            return filter_values(
                found, rows.unreadable, chunk.schema, on_rejected, reject_inexact=reject_inexact
            )
        check_values(rows, chunk.schema, reject_inexact=reject_inexact)
        return found

    with reading(chunk.heap):
        lock_table(connection, chunk.heap, chunk.heap_oid, only=True)
        check_filenodes(connection, {chunk.heap_oid: chunk.filenode}, chunk.heap)
        # `map` keeps no reference to a block, unlike a loop: a block may be one row of a gigabyte.
        yield from map(typed, read_texts(connection, chunk_statement(chunk), len(chunk.schema.columns)))
        check_filenodes(connection, {chunk.heap_oid: chunk.filenode}, chunk.heap)


def chunk_statement(chunk: Chunk) -> str:
    columns = map(sql.Identifier, chunk.schema.column_names)
    heap = sql.Identifier(chunk.heap.schema, chunk.heap.name)
    first = sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({chunk.first},0)"))
    bounds = (
        [first]
        if chunk.last is None
        else [first, sql.SQL("ctid < {}::tid").format(sql.Literal(f"({chunk.last},0)"))]
    )
    if chunk.row_filter is not None:
        # The server printed it from the parsed expression of the publication, so it is valid SQL.
        bounds.append(sql.SQL("({})").format(sql.SQL(chunk.row_filter)))
    return (
        sql.SQL("SELECT {} FROM ONLY {} WHERE {}")
        .format(sql.SQL(", ").join(columns), heap, sql.SQL(" AND ").join(bounds))
        .as_string()
    )


def filter_values(
    batch: pa.RecordBatch,
    unreadable: Collection[str],
    schema: TableSchema,
    on_rejected: OnRejected,
    *,
    reject_inexact: bool,
) -> pa.RecordBatch:
    """Remove rejected rows, by the rules of `check_values`, and pass them to `on_rejected`. `unreadable` are
    columns with unreadable texts.
    """
    exact = batch.column(batch.num_columns - 1)
    errors: dict[int, PenstockError] = {}
    if exact.null_count < batch.num_rows and (unreadable or reject_inexact):
        for row in pc.indices_nonzero(exact.is_valid()).to_pylist():
            entries = exact[row].as_py()
            broken = next(
                (column for column, text in entries if column in unreadable and REPLACED in text), None
            )
            if broken is not None:
                errors[row] = UnreadableTextError.of(schema.name, broken)
            elif reject_inexact:
                errors[row] = UnrepresentableError.of(schema.name, entries[0][0])
    if not errors:
        return batch
    refused = pa.array([row in errors for row in range(batch.num_rows)])
    on_rejected(batch.filter(refused), list(errors.values()))
    return batch.filter(pc.invert(refused))


def check_values(rows: DecodedRows, schema: TableSchema, *, reject_inexact: bool) -> None:
    for column in rows.unreadable:
        raise UnreadableTextError.of(schema.name, column)
    if reject_inexact:
        for column in rows.inexact_columns:
            raise UnrepresentableError.of(schema.name, column)


def _import_snapshot(connection: Connection, snapshot: str, table: TableName) -> None:
    try:
        connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
    except psycopg.Error as error:
        if error.sqlstate in _SNAPSHOT_GONE:
            raise SnapshotLostError(
                f"the snapshot of {table} was lost while it was being read; the rest is read under a new one"
            ) from error
        raise


def lock_table(connection: Connection, table: TableName, oid: int, *, only: bool) -> None:
    """Lock a table until the transaction ends, so that it is not renamed, altered or truncated. With `only`,
    its partitions are not locked. Raises an error if the name no longer refers to `oid`. Also raises the
    driver's errors.
    """
    name = sql.Identifier(table.schema, table.name)
    statement = sql.SQL(
        "LOCK TABLE {}{} IN ACCESS SHARE MODE; SELECT pg_catalog.to_regclass({})::oid"
    ).format(sql.SQL("ONLY " if only else ""), name, sql.Literal(name.as_string()))
    # As bytes: in a SQL_ASCII database the driver cannot encode a name that is not ASCII.
    result = connection.pgconn.exec_(statement.as_string().encode())
    if result.status != ExecStatus.TUPLES_OK:
        raise psycopg.errors.error_from_result(result)
    if result.get_value(0, 0) != str(oid).encode():
        raise TableRewrittenError(
            f"table {table} was renamed or replaced while it was being read; its snapshot starts again"
        )


def check_filenodes(connection: Connection, planned: Mapping[int, int], table: TableName) -> None:
    """Compare the planned filenodes of heaps, by OID, with the current ones and with those that the snapshot
    shows. Without this check, a table that was rewritten between snapshot and plan looks empty.
    """
    found = set(connection.execute(query("catalog", "filenodes"), {"oids": list(planned)}))
    if found != {(oid, filenode, filenode) for oid, filenode in planned.items()}:
        raise TableRewrittenError(
            f"table {table} was rewritten or emptied while it was being read; its snapshot starts again"
        )


_OIDS = 1 << 32
_PATIENCE = ("SET LOCAL lock_timeout = '200ms'", "SET LOCAL statement_timeout = '5s'")


@dataclass(frozen=True, slots=True)
class Partition:
    root: int
    """The OID of the partition's root table."""
    filenode: int
    xid: int
    """The lower 32 bits of the id of the last transaction that changed the partition's catalog row: the one
    that attached it, or a later one.
    """
    is_attached: bool = False
    """Whether the partition was attached as an existing table, which may have had rows."""


@dataclass(frozen=True, slots=True)
class Partitions:
    """The partitions of one table, by OID, at one moment."""

    leaves: Mapping[int, Partition]
    mark: int
    """A transaction id. Every transaction with a lower id had ended at that moment."""


def inspect_parts(
    connection: Connection, sources: Mapping[TableName, Collection[int]], known: Collection[int] = ()
) -> dict[TableName, Partitions]:
    """Return the partitions of each table in `sources`; tables without partitions are omitted. `sources` has
    for each table the OIDs of the source tables that it consists of: its own, or those of the tables routed
    into it. Partitions in `known` are not checked for `is_attached`, since that check waits for exclusive
    locks of other sessions.
    """
    found: dict[int, dict[int, Partition]] = {}
    wanted = [oid for oids in sources.values() for oid in oids if oid < _OIDS]
    rows: list[Any] = (
        connection.execute(query("parts", "leaves"), {"oids": wanted, "known": list(known)}).fetchall()
        if wanted
        else []
    )
    for root, oid, filenode, xid, is_attached, _ in rows:
        found.setdefault(root, {})[oid] = Partition(root, filenode, xid, is_attached)
    leaves = {
        name: {oid: part for root in oids for oid, part in found.get(root, {}).items()}
        for name, oids in sources.items()
    }
    return {name: Partitions(parts, rows[0][-1]) for name, parts in leaves.items() if parts}


def has_older_row(connection: Connection, leaf: int, root: int, mark: int) -> bool | None:
    """Whether a partition has a row that was written before transaction `mark`, so that it was not truncated
    since. Also False if the role lacks the privilege, or if the query takes longer than a few seconds. None
    if another session holds the partition exclusively.
    """
    names = inspect_names(connection, [leaf, root])
    refuse_views(connection)
    for oid in (leaf, root):  # a role may be allowed to read the root, but not its partitions
        heap = names.get(oid)
        if heap is None:
            return None
        statement = sql.SQL(query("parts", "older_row")).format(heap=sql.Identifier(heap.schema, heap.name))
        try:
            with connection.transaction():
                for setting in _PATIENCE:
                    connection.execute(setting)
                lock_table(connection, heap, oid, only=False)
                return connection.execute(statement, {"leaf": leaf, "mark": mark}).fetchone() is not None
        except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable, TableRewrittenError):
            return None
        except psycopg.errors.QueryCanceled:
            return False
        except psycopg.errors.InsufficientPrivilege:
            continue
    return False
