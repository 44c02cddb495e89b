"""Queries of a polling capture: rows changed since an earlier poll, open transactions, and the resume tables
`penstock.polling` and `penstock.polled_tables`.

Polling by `xmin`, the transaction that wrote a row, requires no column and misses no change: a row version
that a snapshot does not show was written by the oldest transaction open at that time, or by a later one. Each
poll reads the whole table. Rows contain only 32 bits of the transaction id. So ids are compared by age, and
only if fewer than two billion transactions are in between.

Polling by a cursor column that increases with every change (a timestamp, a sequence number) uses an index,
but its result depends on how the column is written. The rule for writers: a transaction writes no value below
those that existed when it began. But a transaction may commit long after others that wrote higher values. So
the capture keeps, for every open transaction, the highest value from before that transaction began, and each
poll starts at the lowest of these values. Without open transactions, a poll starts at the highest value of
the previous poll. Transactions are identified by their virtual ids, which exist from their beginning. A
prepared transaction has none, so while one exists the start does not move.

With both methods, a poll reads some rows again that an earlier poll returned. A row version is identified by
its ctid and xmin, so known versions are removed without comparing values.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, LiteralString, TypeAlias

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from penstock.change import ChangeBatch, ChangeCounts, ChangeType, change_schema
from penstock.errors import PrivilegeError, SlotBusyError, UnsupportedTableError
from penstock.position import Position
from penstock.postgres.chunks import reading
from penstock.postgres.connection import Connection
from penstock.postgres.consistent_read import ConsistentRead
from penstock.postgres.copy_text import read_texts
from penstock.postgres.ownership import Lease, OwnSchema, OwnTable
from penstock.postgres.queries import identifier, query
from penstock.postgres.types.rows import decode_rows
from penstock.schema import TableName, TableSchema


@dataclass(frozen=True, slots=True)
class OpenTransactions:
    """The transactions that were open at one time."""

    virtual_ids: frozenset[str] = frozenset()
    is_prepared: bool = False


def inspect_open(connection: Connection) -> OpenTransactions:
    """Return the transactions that are open now. Call it before the consistent read: a transaction that is
    neither in the result nor visible to the read has begun in between.
    """
    rows: list[Any] = connection.execute(query("polling", "open_transactions")).fetchall()
    # Prepared transactions are queried last: a transaction that is missing in the list above may have been
    # prepared since, and is then found here.
    prepared: Any = connection.execute(query("polling", "prepared")).fetchone()
    return OpenTransactions(frozenset(str(row[0]) for row in rows), prepared[0] > 0)


class SafePolls:
    """Determines the last safe poll. A poll is safe if all values that appear later are at or above its
    highest value. Polls are counted from 1; 0 is the state before the first.
    """

    def __init__(self) -> None:
        self._polls = 0
        self._safe = 0
        self._before: dict[str, int] = {}
        """For every open transaction, a poll whose highest value existed before the transaction began."""

    def next_poll(self, now: OpenTransactions) -> int:
        """Process the transactions that are open at the next poll. Returns the number of the last safe poll.
        A new transaction may have begun while the previous poll was running. But it began after the poll
        before that one, so it writes nothing below the highest value of that poll.
        """
        before, self._polls = self._polls, self._polls + 1
        self._before = {each: self._before.get(each, max(0, before - 1)) for each in now.virtual_ids}
        if not now.is_prepared:
            self._safe = max(self._safe, min(self._before.values(), default=before))
        return self._safe

    @property
    def polls(self) -> int:
        return self._polls


class InitialTransactions:
    """Tracks whether all transactions that were open at the first call have ended."""

    def __init__(self) -> None:
        self._left: frozenset[str] | None = None
        self._are_gone = False

    def have_ended(self, now: OpenTransactions) -> bool:
        if self._left is None:
            self._left = now.virtual_ids
        elif not now.is_prepared:
            self._left &= now.virtual_ids
        self._are_gone = self._are_gone or not (self._left or now.is_prepared)
        return self._are_gone


_MOST_TRANSACTIONS = (1 << 31) - (1 << 20)
"""The age up to which the transaction of a row can be compared."""

_SHOWN: dict[str, LiteralString] = {
    "timestamp with time zone": "least({column}, now()) - interval '5 seconds'",
    "timestamp without time zone": "{column} - interval '5 seconds'",
}
"""SQL for the highest timestamp value that is used, which is some seconds earlier than the highest one. The
reasons are that a transaction's timestamp is earlier than its first lock, and that clocks may be set back.
"""


@dataclass(frozen=True, slots=True)
class CursorColumn:
    """A column that increases with every change of a row."""

    name: str
    type_name: str
    """The name of the type, as SQL writes it."""


@dataclass(frozen=True, slots=True)
class PolledTable:
    """A table and its cursor column. The column is None if the table is polled by `xmin`."""

    schema: TableSchema
    is_partitioned: bool
    cursor: CursorColumn | None = None

    @property
    def how(self) -> str:
        """A text that identifies the table's polling method."""
        return "xmin" if self.cursor is None else f"{self.cursor.name} {self.cursor.type_name}"


@dataclass(frozen=True, slots=True)
class Window:
    """The rows that may have changed and that a poll reads: those written by transaction `horizon` or later,
    and those with a cursor value of at least `low`. With neither bound, these are all rows.
    """

    low: str | None = None
    horizon: int | None = None

    @property
    def is_everything(self) -> bool:
        return self.low is None and self.horizon is None


EVERYTHING = Window()


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Rows as texts. Each row has the identity of its version, and a flag whether the next poll reads it
    again although it has not changed.
    """

    versions: pa.StringArray
    comes_again: pa.BooleanArray
    texts: list[pa.StringArray] = field(default_factory=list)
    is_before: list[pa.BooleanArray] = field(default_factory=list)
    """For each requested horizon, whether an older transaction wrote the row version."""

    def filter(self, mask: pa.BooleanArray) -> RowBlock:
        return RowBlock(
            self.versions.filter(mask),
            self.comes_again.filter(mask),
            [text.filter(mask) for text in self.texts],
            [each.filter(mask) for each in self.is_before],
        )

    def without(self, versions: pa.StringArray) -> RowBlock:
        """Return the rows whose versions are not among `versions`."""
        return self.filter(pc.invert(pc.is_in(self.versions, versions))) if len(versions) else self


def read_window(
    connection: Connection,
    table: PolledTable,
    window: Window,
    following: Window,
    read: ConsistentRead,
    *,
    horizons: Sequence[int] = (),
) -> Generator[RowBlock]:
    """Yield the rows of `window` that the transaction of `read` sees. `following` is the window of the next
    poll.
    """
    columns = sql.SQL(", ").join(
        [sql.SQL("t.{}").format(sql.Identifier(name)) for name in table.schema.column_names]
    )
    before = [sql.SQL("NOT ({})").format(_written_since(horizon, read)) for horizon in horizons]
    statement = sql.SQL("SELECT {facts}, {columns} FROM {rows} WHERE {wanted}").format(
        facts=sql.SQL(", ").join([_VERSION, window_condition(table, following, read), *before]),
        columns=columns,
        rows=_rows(table),
        wanted=window_condition(table, window, read),
    )
    with reading(table.schema.name):
        for texts in read_texts(
            connection, statement.as_string(), 2 + len(before) + len(table.schema.columns)
        ):
            comes_again, *is_before = [pc.equal(text, "t") for text in texts[1 : 2 + len(before)]]
            yield RowBlock(texts[0], comes_again, texts[2 + len(before) :], is_before)


def read_versions(
    connection: Connection, table: PolledTable, window: Window, read: ConsistentRead, most: int
) -> pa.StringArray:
    """Return the versions of the rows in a window, at most `most` of them."""
    statement = sql.SQL("SELECT {} FROM {} WHERE {} LIMIT {}").format(
        _VERSION, _rows(table), window_condition(table, window, read), sql.Literal(most)
    )
    with reading(table.schema.name):
        blocks = [texts[0] for texts in read_texts(connection, statement.as_string(), 1)]
    return pa.concat_arrays(blocks) if blocks else pa.array([], pa.string())


def inspect_highest(connection: Connection, table: PolledTable) -> str | None:
    """Return the highest value of the cursor as text; for a timestamp, slightly less. None if there are no
    rows.
    """
    assert table.cursor is not None
    column = sql.SQL("t.{}").format(sql.Identifier(table.cursor.name))
    shown = sql.SQL(_SHOWN.get(table.cursor.type_name, "{column}")).format(column=column)
    # ORDER BY is used, since some ordered types lack max. There is no cast to text, which might be a function
    # of the type's owner.
    statement = sql.SQL("SELECT {} FROM {} ORDER BY {} DESC LIMIT 1").format(shown, _rows(table), column)
    with reading(table.schema.name):
        found = [
            text
            for texts in read_texts(connection, statement.as_string(), 1)
            for text in texts[0].to_pylist()
        ]
    return found[0] if found else None


def read_keys_in_order(connection: Connection, table: PolledTable) -> Iterator[list[pa.StringArray]]:
    """Yield all keys of the table, in order of a hash. A batch has the hash, the key as one text, and a text
    for each of its columns.
    """
    keys = [sql.SQL("t.{}").format(sql.Identifier(name)) for name in table.schema.key]
    whole = sql.SQL('(ROW({})::text COLLATE "C")').format(sql.SQL(", ").join(keys))
    statement = sql.SQL("SELECT hashtextextended({whole}, 0), {whole}, {keys} FROM {rows} ORDER BY 1").format(
        whole=whole, keys=sql.SQL(", ").join(keys), rows=_rows(table)
    )
    with reading(table.schema.name):
        yield from read_texts(connection, statement.as_string(), 2 + len(keys))


CursorFacts: TypeAlias = tuple[str, bool, bool]
"""Properties of a column: its type as SQL writes it, whether it is NOT NULL, whether its type has an order.
"""


def inspect_cursors(connection: Connection, oids: Sequence[int]) -> dict[tuple[int, str], CursorFacts]:
    """Return the properties of all columns of these tables, by OID of the table and name of the column."""
    rows: list[Any] = connection.execute(query("polling", "cursor_columns"), {"oids": list(oids)}).fetchall()
    return {
        (oid, name): (type_name, is_filled, is_ordered)
        for oid, name, type_name, is_filled, is_ordered in rows
    }


def check_cursor(table: TableName, column: str, found: CursorFacts | None) -> CursorColumn:
    """Return the column as a cursor column. Raises an error with the reason if the table cannot be polled by
    it.
    """
    if found is None:
        raise UnsupportedTableError(
            f"table {table} has no column {column!r} to poll by", hint="name one of its columns, or xmin"
        )
    type_name, is_filled, is_ordered = found
    if not is_ordered:
        raise UnsupportedTableError(
            f"column {column!r} of {table} is of type {type_name}, whose values have no order",
            hint="name another column, or xmin",
        )
    if not is_filled:
        alter = f"ALTER TABLE {identifier(table.schema, table.name)} ALTER {identifier(column)} SET NOT NULL;"
        raise UnsupportedTableError(
            f"column {column!r} of {table} may be NULL, and rows with NULL would never be found", hint=alter
        )
    return CursorColumn(column, type_name)


_VERSION = sql.SQL("concat(t.tableoid, t.ctid, ':', t.xmin)")


def _rows(table: PolledTable) -> sql.Composed:
    name = sql.Identifier(table.schema.name.schema, table.schema.name.name)
    return sql.SQL("{}{} AS t").format(sql.SQL("" if table.is_partitioned else "ONLY "), name)


def window_condition(table: PolledTable, window: Window, read: ConsistentRead) -> sql.Composable:
    """Return the SQL condition that a row of `t` is in the window."""
    if table.cursor is None:
        return _written_since(window.horizon, read)
    if window.low is None:
        return sql.SQL("true")
    changed = sql.SQL("t.{} >= CAST({} AS {})").format(
        sql.Identifier(table.cursor.name), sql.Literal(window.low), sql.SQL(table.cursor.type_name)
    )
    return (
        changed
        if window.horizon is None
        else sql.SQL("({} OR {})").format(changed, _written_since(window.horizon, read))
    )


def _written_since(horizon: int | None, read: ConsistentRead) -> sql.Composable:
    """Return the SQL condition that `horizon` or a later transaction wrote a row. It is true for all rows if
    `horizon` is too old to compare, or seems to be in the future because the server was restored.
    """
    if horizon is None or not 0 <= read.xmax - horizon < _MOST_TRANSACTIONS:
        return sql.SQL("true")
    number = sql.Literal(str(horizon & 0xFFFF_FFFF))
    # A row that was written too long ago seems to be from the future, since a frozen row keeps its old xmin.
    # Its age is negative.
    return sql.SQL("age(t.xmin) BETWEEN 0 AND age({}::xid)").format(number)


_UNCHANGED = pa.list_(pa.string())


@dataclass(frozen=True, slots=True)
class Place:
    """The position and the first ordinal of some changes."""

    position: Position
    time: datetime
    ordinal: int
    xid: int = 0
    """The transaction id; 0 if it is unknown."""


def change_batch(
    schema: TableSchema, kind: ChangeType, texts: Sequence[pa.StringArray], place: Place
) -> ChangeBatch:
    """Build a batch of changes of one kind from one text array per column. For deletes, only the key columns
    are used.
    """
    count = len(texts[0]) if texts else 0
    if kind is ChangeType.DELETE and schema.key:
        keep = set(schema.key)
        texts = [
            text if name in keep else pa.nulls(count, pa.string())
            for name, text in zip(schema.column_names, texts, strict=True)
        ]
    decoded = decode_rows(texts, schema, count)
    metadata = [
        pa.repeat(pa.scalar(str(kind), pa.string()), count),
        pa.repeat(pa.scalar(place.position.value, pa.int64()), count),
        pa.repeat(pa.scalar(place.time, pa.timestamp("us", "UTC")), count),
        pa.array(range(place.ordinal, place.ordinal + count), pa.int64()),
        pa.repeat(pa.scalar(place.xid, pa.int64()), count),
        pa.nulls(count, _UNCHANGED),
        decoded.exact,
    ]
    rows = pa.RecordBatch.from_arrays([*decoded.columns, *metadata], schema=change_schema(schema))
    return ChangeBatch(schema, rows, _counts(kind, count, decoded.inexact, sum(decoded.unreadable.values())))


def truncate_batch(schema: TableSchema, place: Place) -> ChangeBatch:
    """Build a batch with a single truncate."""
    return change_batch(
        schema, ChangeType.TRUNCATE, [pa.nulls(1, pa.string()) for _ in schema.columns], place
    )


def _counts(kind: ChangeType, count: int, inexact: int, unreadable: int) -> ChangeCounts:
    return ChangeCounts(
        inserts=count if kind is ChangeType.INSERT else 0,
        updates=count if kind is ChangeType.UPDATE_POSTIMAGE else 0,
        deletes=count if kind is ChangeType.DELETE else 0,
        truncates=count if kind is ChangeType.TRUNCATE else 0,
        inexact=inexact,
        unreadable=unreadable,
    )


_SCHEMA = "penstock"
_POLLING = OwnTable(
    "polling",
    {"name": "text", "position": "pg_lsn", "state": "text", "confirmed_at": "timestamp with time zone"},
    defaults={"confirmed_at": "now()"},
)
_POLLED = OwnTable("polled_tables", {"name": "text", "oid": "oid", "state": "text"})
_OWN = OwnSchema(_SCHEMA, (_POLLING, _POLLED))
_MADE = (psycopg.errors.DuplicateSchema, psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation)
_REFUSED = (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction)


class ResumeTable:
    """The resume state of the capture `name`, stored in the source; used over one connection."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    def load_mark(self) -> tuple[Position, str] | None:
        row: Any = self._execute("load_resume").fetchone() if self._has_tables else None
        return None if row is None else (Position.parse(row[0]), row[1])

    def begin_mark(self, position: Position, state: str) -> None:
        self._ensure()
        self._execute("begin_resume", position=str(position), state=state)

    def save_mark(self, position: Position, state: str) -> None:
        self._ensure()
        self._execute("save_resume", position=str(position), state=state)

    def load_tables(self) -> dict[int, str]:
        rows: Any = self._execute("load_polled").fetchall() if self._has_tables else []
        return dict(rows)

    def save_tables(self, tables: Mapping[int, str]) -> None:
        self._ensure()
        with self._connection.transaction():
            for oid, state in tables.items():
                self._execute("save_polled", oid=oid, state=state)

    def remove_tables(self, oids: Collection[int]) -> None:
        self._execute("remove_polled", oids=list(oids))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lease of this name during the block.

        Raises `SlotBusyError` if another capture holds it.
        """
        self._ensure()
        lease = Lease(self._connection, _SCHEMA, f"polling/{self._name}")
        lease.ensure_table()
        holder = lease.take()
        if holder is not None:
            raise SlotBusyError(f"another process polls under the name {self._name}: {holder}")
        try:
            yield
        finally:
            lease.release()

    @property
    def _has_tables(self) -> bool:
        """Whether the tables exist. Raises `UntrustedObjectError` if they must not be used."""
        found = _OWN.check(self._connection)
        return found is not None and not found.missing

    def _ensure(self) -> None:
        if self._has_tables:
            return
        # The tables are checked again afterwards, since another role may have created the schema in between.
        # If two captures create the tables at once, one fails, which does no harm.
        with _permission_errors(), suppress(*_MADE), self._connection.transaction():
            if _OWN.check(self._connection) is None:
                self._connection.execute(query("polling", "create_resume_schema"))
            self._connection.execute(query("polling", "create_resume"))
        if not self._has_tables:
            raise PrivilegeError(
                f"schema {_SCHEMA} has only some of the tables of a polling capture",
                hint="DROP TABLE IF EXISTS penstock.polling, penstock.polled_tables; then start again",
            )

    def _execute(self, statement: str, **arguments: object) -> psycopg.Cursor[tuple[object, ...]]:
        with _permission_errors():
            return self._connection.execute(query("polling", statement), {"name": self._name, **arguments})


def _statements(name: LiteralString) -> str:
    return " ".join(query("polling", name).split())


@contextmanager
def _permission_errors() -> Iterator[None]:
    try:
        yield
    except _REFUSED as error:
        statements = f"{_statements('create_resume_schema')} {_statements('create_resume')}"
        raise PrivilegeError(
            "the role may not create or use the tables that store the polling state",
            hint=f"as an administrator: {statements} GRANT USAGE ON SCHEMA penstock TO …; "
            "GRANT SELECT, INSERT, UPDATE, DELETE ON penstock.polling, penstock.polled_tables TO …; "
            "or store it in files, with polling.resume",
        ) from error
