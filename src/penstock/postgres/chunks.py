"""Reading a table in pieces: block ranges of its heap, under one exported snapshot, on any machine that reaches the source.

Ranges of ctid need no key. The last range of a table is open at its end, so that growth between planning and reading does no harm. A
rewrite of the table (VACUUM FULL, CLUSTER, TRUNCATE) moves rows to other blocks or hides them; each chunk therefore looks at the
relation's filenode before and after its rows and fails if it is not the planned one. Rows are read by name: the heap is locked first, and
its name compared with its OID, since another relation in its place, such as a view, could run its owner's functions as our role.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.pq import ExecStatus

from penstock.change import EXACT, EXACT_TYPE, REPLACED
from penstock.errors import PenstockError, SnapshotLostError, TableRewrittenError, UnreadableTextError, UnrepresentableError
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import Connection, SourceAddress, connect, pass_bytes, refuse_views, translate
from penstock.postgres.copying import read_texts
from penstock.postgres.exported import reader_name
from penstock.postgres.outline import Leaf, MeasuredTable, TableOutline, inspect_leaves, inspect_row_filter, lock_patience
from penstock.postgres.queries import query
from penstock.postgres.types.rows import DecodedRows, decode_rows
from penstock.schema import TableName, TableSchema

BLOCK_BYTES = 8192

Aside = Callable[[pa.RecordBatch, Sequence[PenstockError]], None]
"""Takes rows that are refused, and why each of them is."""

# What SET TRANSACTION SNAPSHOT says, by version, to a name that is no longer exported: invalid parameter, undefined object; and to one
# whose session has just ended: not in prerequisite state.
_SNAPSHOT_GONE = frozenset({"22023", "42704", "55000"})

# A column, a table or a schema that was there when the chunk was planned; or something in its place that cannot be locked as a table.
_ALTERED = frozenset({"42703", "42P01", "42809", "3F000"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks `first` to `last` (exclusive; None: to the end) of one heap, which is `schema`'s table or one of its partitions."""

    schema: TableSchema
    heap: TableName
    heap_oid: int
    filenode: int
    first: int
    last: int | None
    heap_bytes: int
    row_filter: str | None = None
    """Which rows the publication lets into the stream, as the server writes it; the others are no part of the table to us."""
    constants: tuple[tuple[str, str], ...] = ()
    """Columns that the heap has not, behind those that it has, and the text that all its rows have there."""


def plan_chunks(connection: Connection, table: CatalogTable, schema: TableSchema, chunk_bytes: int, publication: str | None) -> list[Chunk]:
    """Cut a table into chunks of about `chunk_bytes` of heap, of the rows that `publication` lets through. Call it after the snapshot."""
    row_filter = inspect_row_filter(connection, table.oid, publication)
    leaves, sizes = inspect_leaves(connection, table.oid)
    return _cut([_whole(schema, leaf, row_filter) for leaf in leaves], sizes, chunk_bytes)


def cut_chunks(table: MeasuredTable, chunk_bytes: int) -> list[Chunk]:
    """The same for a table that has been looked at, after the snapshot."""
    return _cut(list(whole_leaves(table.outline).values()), table.leaf_bytes, chunk_bytes)


def whole_leaves(outline: TableOutline) -> dict[int, Chunk]:
    """Every heap of a table, by OID, as one chunk."""
    return {leaf.oid: _whole(part.schema, leaf, part.row_filter, outline.constants(part)) for part in outline.parts for leaf in part.leaves}


def _whole(schema: TableSchema, leaf: Leaf, row_filter: str | None, constants: tuple[tuple[str, str], ...] = ()) -> Chunk:
    return Chunk(schema, leaf.name, leaf.oid, leaf.filenode, 0, None, 0, row_filter, constants)


def _cut(heaps: Sequence[Chunk], sizes: Mapping[int, int], chunk_bytes: int) -> list[Chunk]:
    """Every heap by itself, the largest first."""
    chunks = []
    step = max(1, chunk_bytes // BLOCK_BYTES)
    for heap in sorted(heaps, key=lambda heap: -sizes[heap.heap_oid]):
        blocks = sizes[heap.heap_oid] // BLOCK_BYTES
        starts = list(range(0, max(1, blocks), step))
        for index, first in enumerate(starts):
            last = None if index == len(starts) - 1 else first + step
            chunks.append(replace(heap, first=first, last=last, heap_bytes=(min(first + step, blocks) - first) * BLOCK_BYTES))
    return chunks


def snapshot_schema(schema: TableSchema) -> pa.Schema:
    """A table's own columns, then `_exact`."""
    return pa.schema([*(pa.field(column.name, column.arrow_type) for column in schema.columns), pa.field(EXACT, EXACT_TYPE)])


def chunk_schema(chunk: Chunk) -> pa.Schema:
    """What `read_chunk` yields of this one."""
    return _extended(snapshot_schema(chunk.schema), chunk.constants)


def with_constants(batch: pa.RecordBatch, constants: Sequence[tuple[str, str]]) -> pa.RecordBatch:
    """Rows with further columns, before `_exact`, that are the same in all of them."""
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
    refuse_inexact: bool = False,
    aside: Aside | None = None,
    session: Connection | None = None,
) -> Generator[pa.RecordBatch]:
    """The rows of one chunk, typed by the stream's own decoder. Runs on an executor; opens its own connection unless a `session` is given.

    Without a snapshot it is read under one of its own, of no use to other chunks. With `refuse_inexact`, a value that its type cannot
    hold is an error; rows that are refused go to `aside`, if it is given.
    """
    with open_snapshot(address, snapshot, chunk.heap) if session is None else nullcontext(session) as connection:
        rows = _read(connection, chunk, refuse_inexact=refuse_inexact, aside=aside)
        yield from map(partial(with_constants, constants=chunk.constants), rows)


def probe_chunks(address: SourceAddress, snapshot: str, chunks: Sequence[Chunk]) -> dict[TableName, PenstockError]:
    """Read the chunks only to see whether they can be read; gives back the heaps that cannot, each with its reason."""
    failures: dict[TableName, PenstockError] = {}
    waiting = list(chunks)
    while waiting:
        chunk = waiting[0]
        try:
            with open_snapshot(address, snapshot, chunk.heap) as connection:
                while waiting:
                    chunk = waiting.pop(0)
                    for _ in _read(connection, chunk, refuse_inexact=False):
                        pass
        except PenstockError as error:
            failures[chunk.heap] = error
        if chunk in waiting:  # not even opened
            return failures
    return failures


@contextmanager
def open_snapshot(address: SourceAddress, snapshot: str | None, table: TableName) -> Iterator[Connection]:
    """A connection in a transaction under the snapshot, or one of its own, which ends with the block.

    `table` is for the message if the snapshot is gone.
    """
    with connect(address, reader_name(snapshot)) as connection:
        try:
            with reading(table):
                refuse_views(connection)
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                if snapshot is not None:
                    _import_snapshot(connection, snapshot, table)
                connection.execute(lock_patience())
                pass_bytes(connection)
            yield connection
        finally:
            # Perhaps in the middle of a COPY; and there is nothing to commit.
            connection.close()


@contextmanager
def lock_tables(address: SourceAddress, tables: Sequence[TableName]) -> Iterator[Connection]:
    """A session whose transaction locks these tables (ACCESS SHARE), so that TRUNCATE and rewrites wait until the block ends.

    The lock comes before the snapshot, which `begin_locked` imports. All of the reading must happen in this session: others would queue
    behind a TRUNCATE that waits for it. `LockWaitError` if another session has a table to itself.
    """
    with connect(address, reader_name(None)) as connection:
        try:
            with reading(tables[0]):
                connection.execute(lock_patience())
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
        pass_bytes(connection)


@contextmanager
def reading(table: TableName) -> Iterator[None]:
    """Turn the driver's errors into ours."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate in _ALTERED:
            raise TableRewrittenError(f"table {table} was altered while it was being read; its snapshot starts again") from None
        raise translate(error, f"reading {table}") from None


def _read(connection: Connection, chunk: Chunk, *, refuse_inexact: bool, aside: Aside | None = None) -> Generator[pa.RecordBatch]:
    target = snapshot_schema(chunk.schema)

    def typed(texts: list[pa.StringArray]) -> pa.RecordBatch:
        rows = decode_rows(texts, chunk.schema)
        found = pa.RecordBatch.from_arrays([*rows.columns, rows.exact], schema=target)
        if aside is not None:
            return kept_values(found, rows.unreadable, chunk.schema, aside, refuse_inexact=refuse_inexact)
        check_values(rows, chunk.schema, refuse_inexact=refuse_inexact)
        return found

    with reading(chunk.heap):
        lock_table(connection, chunk.heap, chunk.heap_oid, only=True)
        check_filenodes(connection, {chunk.heap_oid: chunk.filenode}, chunk.heap)
        # Unlike a loop, `map` holds on to nothing: a block may be one row of a gigabyte.
        yield from map(typed, read_texts(connection, chunk_statement(chunk), len(chunk.schema.columns)))
        check_filenodes(connection, {chunk.heap_oid: chunk.filenode}, chunk.heap)


def chunk_statement(chunk: Chunk) -> str:
    columns = map(sql.Identifier, chunk.schema.column_names)
    heap = sql.Identifier(chunk.heap.schema, chunk.heap.name)
    first = sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({chunk.first},0)"))
    bounds = [first] if chunk.last is None else [first, sql.SQL("ctid < {}::tid").format(sql.Literal(f"({chunk.last},0)"))]
    if chunk.row_filter is not None:
        # The server wrote it, from an expression that it checked when the publication was made.
        bounds.append(sql.SQL("({})").format(sql.SQL(chunk.row_filter)))
    return sql.SQL("SELECT {} FROM ONLY {} WHERE {}").format(sql.SQL(", ").join(columns), heap, sql.SQL(" AND ").join(bounds)).as_string()


def kept_values(
    batch: pa.RecordBatch, unreadable: Collection[str], schema: TableSchema, aside: Aside, *, refuse_inexact: bool
) -> pa.RecordBatch:
    """The rows that `check_values` has nothing against; `aside` gets the others. `unreadable` are columns with such texts."""
    exact = batch.column(batch.num_columns - 1)
    errors: dict[int, PenstockError] = {}
    if exact.null_count < batch.num_rows and (unreadable or refuse_inexact):
        for row in pc.indices_nonzero(exact.is_valid()).to_pylist():
            entries = exact[row].as_py()
            broken = next((column for column, text in entries if column in unreadable and REPLACED in text), None)
            if broken is not None:
                errors[row] = UnreadableTextError.of(schema.name, broken)
            elif refuse_inexact:
                errors[row] = UnrepresentableError.of(schema.name, entries[0][0])
    if not errors:
        return batch
    refused = pa.array([row in errors for row in range(batch.num_rows)])
    aside(batch.filter(refused), list(errors.values()))
    return batch.filter(pc.invert(refused))


def check_values(rows: DecodedRows, schema: TableSchema, *, refuse_inexact: bool) -> None:
    for column in rows.unreadable:
        raise UnreadableTextError.of(schema.name, column)
    if refuse_inexact:
        for column in rows.inexact_columns:
            raise UnrepresentableError.of(schema.name, column)


def _import_snapshot(connection: Connection, snapshot: str, table: TableName) -> None:
    try:
        connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
    except psycopg.Error as error:
        if error.sqlstate in _SNAPSHOT_GONE:
            raise SnapshotLostError(f"the snapshot went away while {table} was being read; the rest is read under a new one") from error
        raise


def lock_table(connection: Connection, table: TableName, oid: int, *, only: bool) -> None:
    """Lock a table against being renamed, altered or emptied until the transaction ends; raise if the name is not that of `oid` then.

    `only`: without its partitions. Raises the driver's errors too.
    """
    name = sql.Identifier(table.schema, table.name)
    statement = sql.SQL("LOCK TABLE {}{} IN ACCESS SHARE MODE; SELECT pg_catalog.to_regclass({})::oid").format(
        sql.SQL("ONLY " if only else ""), name, sql.Literal(name.as_string())
    )
    # As bytes: in a SQL_ASCII database the driver would not write a name that is not ASCII.
    result = connection.pgconn.exec_(statement.as_string().encode())
    if result.status != ExecStatus.TUPLES_OK:
        raise psycopg.errors.error_from_result(result)
    if result.get_value(0, 0) != str(oid).encode():
        raise TableRewrittenError(f"table {table} was renamed or replaced while it was being read; its snapshot starts again")


def check_filenodes(connection: Connection, planned: Mapping[int, int], table: TableName) -> None:
    """Compare the planned filenodes of heaps, by OID, with those of now, and with those that the snapshot sees.

    A rewrite between the snapshot and the plan would otherwise make the table look empty.
    """
    found = set(connection.execute(query("catalog", "filenodes"), {"oids": list(planned)}))
    if found != {(oid, filenode, filenode) for oid, filenode in planned.items()}:
        raise TableRewrittenError(f"table {table} was rewritten or emptied while it was being read; its snapshot starts again")
