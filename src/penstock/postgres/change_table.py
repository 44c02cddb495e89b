"""The change table of a trigger capture: assign positions to commits, read their changes, and remove
confirmed ones.

Triggers record changes in the transactions that make them. The reader then orders the committed transactions
with a separate statement that gives each a permanent position, so a repeated read returns the same changes. A
position is the WAL position at the time of that statement, plus a number that distinguishes the transactions
that the statement ordered. So these positions can be compared with WAL positions: snapshots, lag and a server
that was restored to an earlier time are handled as with a replication slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.errors import (
    ChangeTableMissingError,
    PositionGapError,
    SystemChangedError,
    UncheckedTimelineError,
)
from penstock.position import Position
from penstock.postgres.connection import (
    Connection,
    SourceAddress,
    connect,
    conversion_disabled,
    source_errors,
)
from penstock.postgres.copy_text import read_texts
from penstock.postgres.ownership import LEASES, Lease, OwnSchema, OwnTable, waiting_for
from penstock.postgres.queries import query
from penstock.postgres.snapshot_export import ExportedSnapshot
from penstock.schema import TableName

READER = "penstock trigger"
"""The application name of the reading session."""

_TABLES = (
    OwnTable(
        "shapes",
        {
            **dict.fromkeys(("relation", "root", "index"), "oid"),
            **dict.fromkeys(("space", "name"), "text"),
            **dict.fromkeys(("names", "key", "columns"), "text[]"),
            "id": "bigint",
            "numbers": "smallint[]",
            "types": "oid[]",
            "modifiers": "integer[]",
            "generated": "boolean[]",
        },
    ),
    OwnTable(
        "changes",
        {
            **dict.fromkeys(("seq", "shape"), "bigint"),
            **dict.fromkeys(("root", "node"), "oid"),
            **dict.fromkeys(("old_at", "new_at"), "tid"),
            **dict.fromkeys(("old", "new"), "text"),
            "xid": "xid8",
            "op": '"char"',
            "altered": "smallint[]",
        },
    ),
    OwnTable(
        "commits",
        {
            **dict.fromkeys(("position", "first", "last", "changes", "bytes"), "bigint"),
            "xid": "xid8",
            "at": "timestamp with time zone",
        },
    ),
    OwnTable(
        "horizon",
        {
            **dict.fromkeys(("position", "inherited"), "bigint"),
            **dict.fromkeys(("system_identifier", "timeline"), "text"),
            "one": "boolean",
            "snapshot": "pg_snapshot",
        },
        defaults={"one": "true"},
        checks=("CHECK (one)",),
    ),
    OwnTable(
        "resume", {"one": "boolean", "position": "bigint"}, defaults={"one": "true"}, checks=("CHECK (one)",)
    ),
    LEASES,
)

_COLUMNS = 10
_MISSING = frozenset({"3F000", "42P01"})  # the schema, or a table in it, does not exist


@dataclass(frozen=True, slots=True)
class TableState:
    """The positions up to which changes have been ordered and confirmed, and the state of the server."""

    ordered: Position
    confirmed: Position
    server: Position
    """The current WAL position."""
    timeline: str
    """The timeline on which changes were ordered."""
    server_timeline: str
    inherited: Position
    """The position up to which changes were ordered when `timeline` was accepted."""

    @property
    def is_accepted(self) -> bool:
        """Whether the server is on the timeline on which changes are ordered. False after a promotion until
        `ChangeTable.accept` is called.
        """
        return self.timeline == self.server_timeline


@dataclass(frozen=True, slots=True)
class OrderedCommit:
    """One committed transaction with its position, and the numbers of its first and last change."""

    position: Position
    xid: int
    first: int
    last: int
    changes: int
    bytes: int
    at: datetime
    """The time at which the transaction was ordered, shortly after its commit."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The definition of a table or partition when changes were recorded. `fields` are in the order in which
    recorded rows contain them.
    """

    id: int
    oid: int
    """The OID of the table; for a partition, of its root."""
    name: TableName
    fields: tuple[Field, ...]
    key: tuple[str, ...]
    """The names of the fields that identified rows at that time."""


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type_oid: int
    type_modifier: int
    is_generated: bool
    rank: int
    """The place of the field among the columns of the root table."""


class ChangeTable:
    """One change table over one connection, which is not in a transaction. Used by one thread."""

    def __init__(self, connection: Connection, schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self._removed = 0

    def take_lease(self) -> str | None:
        """Take the lease, which makes this session the only reader until the connection ends. Returns None if
        it succeeded, otherwise a description of the session that already reads.
        """
        lease = Lease(self._connection, self._schema, "reader")
        lease.ensure_table()
        return lease.take()

    def inspect(self) -> TableState:
        """Read the state. Raises an error if the change table does not exist, was filled by another server,
        or contains objects of roles that are not trusted.
        """
        own_schema(self._schema).check(self._connection)
        row: Any = self._execute("state").fetchone()
        if row is None:
            raise _missing(self._schema)
        ordered, confirmed, identifier, own_identifier, server, timeline, server_timeline, inherited = row
        if identifier != own_identifier:
            raise SystemChangedError(
                f"the change table {self._schema} was filled by database system {identifier}, and the "
                f"server is {own_identifier}",
                hint=_REINSTALL.format(self._schema),
            )
        ordered, confirmed, server, inherited = map(Position.of, (ordered, confirmed, server, inherited))
        return TableState(ordered, confirmed, server, timeline, server_timeline, inherited)

    def has_unordered(self) -> bool:
        """Whether a committed transaction has not been ordered yet."""
        row: Any = self._execute("has_unordered").fetchone()
        return bool(row[0])

    def accept(self) -> None:
        """Accept the timeline of a promoted server, so that changes can be ordered on it. Call it only after
        `check_reader` has shown that the server has all commits that were ever returned.
        """
        with self._horizon():
            self._execute("accept")

    def sequence(self) -> Position:
        """Order the transactions that have committed so far. Returns a position: all changes up to it have
        been delivered or can be read. Raises `UncheckedTimelineError`, which is retried, on a promoted server
        until its reader calls `accept`.
        """
        with self._horizon():
            return self._sequence()

    def order_under_snapshot(self, export: Callable[[], str]) -> tuple[str, Position]:
        """Order exactly the transactions that a snapshot shows. Returns the snapshot and its position.
        `export` takes the snapshot while no other session can order changes.
        """
        with self._horizon("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"):
            snapshot = export()
            self._connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
            return snapshot, self._sequence()

    def commits(self, after: Position, limit: int) -> list[OrderedCommit]:
        rows: list[Any] = self._execute("commits", {"after": after.value, "limit": limit}).fetchall()
        return [OrderedCommit(Position.of(position), *facts) for position, *facts in rows]

    def cut(self, commit: OrderedCommit, after: int, *, max_changes: int, max_bytes: int) -> int:
        """Return the number of the last change in the next part of a long transaction. The part begins after
        the change number `after`.
        """
        row: Any = self._execute(
            "end_of_part", {"xid": commit.xid, "after": after, "limit": max_changes, "bytes": max_bytes}
        ).fetchone()
        return commit.last if row[0] is None else int(row[0])

    def read_commits(self, after: Position, upto: Position) -> list[pa.StringArray]:
        """Return the changes of all transactions in `(after, upto]`, in order, as `_COLUMNS` text columns."""
        return self._read("read_commits", after=after.value, upto=upto.value)

    def read_part(self, commit: OrderedCommit, after: int, upto: int) -> list[pa.StringArray]:
        return self._read("read_part", position=commit.position.value, after=after, upto=upto)

    def shapes(self, ids: Sequence[int]) -> list[Shape]:
        rows: list[Any] = self._execute("shapes", {"ids": list(ids)}).fetchall()
        return [_shape(row) for row in rows]

    def restore(self, shape: int, numbers: str) -> int | None:
        """Return the id of a shape of the same table as `shape` that has exactly the column numbers
        `numbers`; None if no such shape is known. It is for rows that were recorded with the shape `shape`,
        but contain other columns.
        """
        row: Any = self._execute("find_shape", {"id": shape, "numbers": numbers}).fetchone()
        return None if row[0] is None else int(row[0])

    def confirm(self, position: Position) -> None:
        """Record that changes up to `position` will not be read again."""
        self._execute("confirm", {"position": position.value})

    def remove_confirmed(self, max_changes: int) -> bool:
        """Delete up to about `max_changes` confirmed changes; returns whether there may be more. A partly
        deleted transaction is never read again.
        """
        done: list[Any] = self._execute(
            "confirmed_commits", {"limit": max_changes, "after": self._removed}
        ).fetchall()
        if not done:
            return False
        removed = self._execute(
            "delete_changes", {"xids": [xid for _, xid in done], "limit": max_changes}
        ).rowcount
        if removed < max_changes:
            last = max(position for position, _ in done)
            self._execute("delete_commits", {"after": self._removed, "position": last})
            self._removed = last
        return True

    @contextmanager
    def _horizon(self, *first: LiteralString) -> Iterator[None]:
        """Context manager for a transaction during which no other session can order changes. `first` are its
        first statements, which must not take a snapshot.
        """
        with waiting_for(
            self._connection,
            [TableName(self._schema, "horizon")],
            f"putting changes of {self._schema} into order",
        ):
            for each in first:
                self._connection.execute(each)
            self._execute("lock_horizon")
            yield

    def _sequence(self) -> Position:
        """Order changes within the caller's transaction. The commit of that transaction is always
        synchronous, whatever the role's settings are, because the positions are returned to the reader at
        once.
        """
        self._execute("require_durable_commit")
        row: Any = self._execute("order_commits").fetchone()
        if row is None and not self.inspect().is_accepted:
            raise UncheckedTimelineError(
                "the server was promoted, and the reader has not checked yet whether the change table "
                f"{self._schema} is complete"
            )
        if row is None:
            raise _missing(self._schema)
        return Position.of(row[0])

    def _read(self, name: LiteralString, **numbers: int) -> list[pa.StringArray]:
        literals = {key: sql.Literal(number) for key, number in numbers.items()}
        statement = sql.SQL(query("change_table", name)).format(
            schema=sql.Identifier(self._schema), **literals
        )
        with conversion_disabled(self._connection):
            blocks = list(read_texts(self._connection, statement.as_string(self._connection), _COLUMNS))
        if len(blocks) == 1:
            return blocks[0]
        return [
            pa.concat_arrays([block[at] for block in blocks]) if blocks else pa.array([], pa.string())
            for at in range(_COLUMNS)
        ]

    def _execute(
        self, name: LiteralString, parameters: Mapping[str, object] | None = None
    ) -> psycopg.Cursor[tuple[object, ...]]:
        try:
            return self._connection.execute(statement(name, self._schema), parameters)
        except psycopg.Error as error:
            if error.sqlstate in _MISSING:
                raise _missing(self._schema) from error
            raise


def own_schema(name: str) -> OwnSchema:
    """Return the definition of a change table's schema."""
    return OwnSchema(name, _TABLES, ("note",))


def statement(name: LiteralString, schema: str, **parts: sql.Composable) -> sql.Composed:
    """Return a named statement for the change table in this schema."""
    return sql.SQL(query("change_table", name)).format(schema=sql.Identifier(schema), **parts)


def check_reader(state: TableState, held: Position, schema: str) -> None:
    """Raise an error unless a reader that has everything up to `held` can continue without missing a change.
    The change table stores every position before it is returned. So if its last position is lower than
    `held`, the server was restored to an earlier time, or was promoted before it had received all commits.
    """
    if held > state.ordered:
        raise SystemChangedError(
            f"changes were delivered up to {held}, and the change table {schema} contains only those up to "
            f"{state.ordered}: the server was "
            "restored to an earlier time, or lost its last commits when it was promoted",
            hint=_REINSTALL.format(schema),
        )
    if state.confirmed > held:
        raise PositionGapError(
            f"the change table {schema} begins at {state.confirmed}, but its reader has only the commits "
            f"up to {held}",
            hint=_REINSTALL.format(schema),
        )


@contextmanager
def export_fence(address: SourceAddress, schema: str) -> Iterator[ExportedSnapshot]:
    """Hold a snapshot open for the length of the block, and provide its name and the position at which it is
    exact. It does not wait for open transactions. The reader of the change table can continue as soon as the
    position is known.
    """
    with connect(address, "penstock holder") as holder, holder.transaction():
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        with connect(address) as connection, source_errors("putting changes into order"):
            snapshot, fence = ChangeTable(connection, schema).order_under_snapshot(lambda: _export(holder))
        yield ExportedSnapshot(snapshot, fence)


def _export(holder: Connection) -> str:
    row: Any = holder.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
    return str(row[0])


def _shape(row: Any) -> Shape:
    id_, root, space, name, names, *facts, key_names, columns = row
    # Columns of a partition are matched to those of the root by name.
    places = {column: at for at, column in enumerate(columns)}
    ranks = [places.get(column, len(places) + at) for at, column in enumerate(names)]
    fields = tuple(Field(*each) for each in zip(names, *facts, ranks, strict=True))
    key = tuple(column for column in names if column in key_names)
    return Shape(id_, root, TableName(space, name), fields, key if len(key) == len(key_names) else ())


_REINSTALL = (
    "DROP SCHEMA {} CASCADE; then start the capture, which creates it again, and copy the tables again"
)


def _missing(schema: str) -> ChangeTableMissingError:
    return ChangeTableMissingError(
        f"the change table {schema} does not exist, so changes are not recorded",
        hint="let the capture create it, or run the SQL of its coverage report "
        "(inspect_coverage(…).remediation); then copy the tables again",
    )
