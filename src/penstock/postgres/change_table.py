"""The change table of a capture by triggers: putting commits into order, reading them, and removing what is confirmed.

Triggers write changes down as they happen, in the transactions that make them. The reader puts what has committed into order, by a
statement of its own: from then on each transaction has a position, for good, and what is delivered again is the same. A position is the
place of the server's log at that moment, and a number on top of it that tells transactions of one moment apart. So positions compare with
those of the log itself: a snapshot, a lag in bytes and a server that was set back are told by them as by those of a replication slot.
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

from penstock.errors import ChangeTableMissingError, PositionGapError, SystemChangedError, UncheckedTimelineError
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress, connect, passing_bytes, source_errors
from penstock.postgres.copying import read_texts
from penstock.postgres.exported import ExportedSnapshot
from penstock.postgres.lease import LEASES, Lease, waiting_for
from penstock.postgres.ownership import OwnSchema, OwnTable
from penstock.postgres.queries import query
from penstock.schema import TableName

READER = "penstock trigger"
"""The name of the session that reads."""

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
    OwnTable("resume", {"one": "boolean", "position": "bigint"}, defaults={"one": "true"}, checks=("CHECK (one)",)),
    LEASES,
)

_COLUMNS = 10
_MISSING = frozenset({"3F000", "42P01"})  # the schema, or a table in it


@dataclass(frozen=True, slots=True)
class TableState:
    """How far changes have been put into order, and how far they are confirmed."""

    ordered: Position
    confirmed: Position
    server: Position
    """Where the server's log is."""
    timeline: str
    """On which this was put into order."""
    server_timeline: str
    inherited: Position
    """How far the order had come when that timeline was accepted."""

    @property
    def is_accepted(self) -> bool:
        """Whether the server is still the one that put everything into order, and was not promoted since."""
        return self.timeline == self.server_timeline


@dataclass(frozen=True, slots=True)
class OrderedCommit:
    """One transaction: its position, and the numbers of its first and last change."""

    position: Position
    xid: int
    first: int
    last: int
    changes: int
    bytes: int
    at: datetime
    """When it was put into order: a moment after its commit."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A table, or a partition, as it was when changes were written down. Fields are in the order of their texts."""

    id: int
    oid: int
    """Of the table; for a partition, of the root that it is a part of."""
    name: TableName
    fields: tuple[Field, ...]
    key: tuple[str, ...]
    """The names, among those of the fields, of what told rows apart then."""


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type_oid: int
    type_modifier: int
    is_generated: bool
    rank: int
    """Where it stands among the columns of the table."""


class ChangeTable:
    """Of one capture, over one connection, which is not in a transaction; for one thread."""

    def __init__(self, connection: Connection, schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self._removed = 0

    def take_lease(self) -> str | None:
        """Become the only reader until the connection ends. If there is one already, gives a description of it instead of None."""
        lease = Lease(self._connection, self._schema, "reader")
        lease.ensure_table()
        return lease.take()

    def inspect(self) -> TableState:
        """Raises if there is no change table, or one that must not be trusted: of another server, or with objects of other roles."""
        own_schema(self._schema).check(self._connection)
        row: Any = self._execute("state").fetchone()
        if row is None:
            raise _missing(self._schema)
        ordered, confirmed, identifier, own_identifier, server, timeline, server_timeline, inherited = row
        if identifier != own_identifier:
            raise SystemChangedError(
                f"the change table {self._schema} was filled by database system {identifier}, and the server is {own_identifier}",
                hint=_ANEW.format(self._schema),
            )
        ordered, confirmed, server, inherited = map(Position.of, (ordered, confirmed, server, inherited))
        return TableState(ordered, confirmed, server, timeline, server_timeline, inherited)

    def has_fresh(self) -> bool:
        """Whether a commit waits to be put into order."""
        row: Any = self._execute("has_fresh").fetchone()
        return bool(row[0])

    def accept(self) -> None:
        """Go on with a server that was promoted. Only for who has checked, by `check_reader`, that it has all that was ever given out."""
        with self._horizon():
            self._execute("accept")

    def sequence(self) -> Position:
        """Put into order what has committed so far; everything up to the position that is given back has been delivered or can be read.

        Raises `UncheckedTimelineError`, which passes, on a server that was promoted, until its reader accepts that.
        """
        with self._horizon():
            return self._sequence()

    def sequence_under(self, export: Callable[[], str]) -> tuple[str, Position]:
        """Put into order what a snapshot shows, and nothing else; `export` takes the snapshot once no other session does the same."""
        with self._horizon("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"):
            snapshot = export()
            self._connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
            return snapshot, self._sequence()

    def commits(self, after: Position, limit: int) -> list[OrderedCommit]:
        rows: list[Any] = self._execute("commits", {"after": after.value, "limit": limit}).fetchall()
        return [OrderedCommit(Position.of(position), *facts) for position, *facts in rows]

    def cut(self, commit: OrderedCommit, after: int, *, max_changes: int, max_bytes: int) -> int:
        """The number of the change that ends the next part of a long transaction, behind the change number `after`."""
        row: Any = self._execute("cut", {"xid": commit.xid, "after": after, "limit": max_changes, "bytes": max_bytes}).fetchone()
        return commit.last if row[0] is None else int(row[0])

    def read_commits(self, after: Position, upto: Position) -> list[pa.StringArray]:
        """All changes of the transactions after one position up to another, in order, as `_COLUMNS` columns of text."""
        return self._read("read_commits", after=after.value, upto=upto.value)

    def read_part(self, commit: OrderedCommit, after: int, upto: int) -> list[pa.StringArray]:
        return self._read("read_part", position=commit.position.value, after=after, upto=upto)

    def shapes(self, ids: Sequence[int]) -> list[Shape]:
        rows: list[Any] = self._execute("shapes", {"ids": list(ids)}).fetchall()
        return [_shape(row) for row in rows]

    def restore(self, shape: int, numbers: str) -> int | None:
        """The shape of rows that have the columns of these numbers, and were noted with another; None if nobody can tell any more."""
        row: Any = self._execute("restore", {"id": shape, "numbers": numbers}).fetchone()
        return None if row[0] is None else int(row[0])

    def confirm(self, position: Position) -> None:
        """Never give out again what commits up to `position`."""
        self._execute("confirm", {"position": position.value})

    def remove_confirmed(self, max_changes: int) -> bool:
        """Remove about so many changes that are confirmed; says whether there are more. What is removed by halves is not read again."""
        done: list[Any] = self._execute("done", {"limit": max_changes, "after": self._removed}).fetchall()
        if not done:
            return False
        removed = self._execute("delete_changes", {"xids": [xid for _, xid in done], "limit": max_changes}).rowcount
        if removed < max_changes:
            last = max(position for position, _ in done)
            self._execute("delete_commits", {"after": self._removed, "position": last})
            self._removed = last
        return True

    @contextmanager
    def _horizon(self, *first: LiteralString) -> Iterator[None]:
        """A transaction that is the only one to put changes into order. Neither statement that begins it takes a snapshot."""
        with waiting_for(self._connection, [TableName(self._schema, "horizon")], f"putting changes of {self._schema} into order"):
            for each in first:
                self._connection.execute(each)
            self._execute("lock_horizon")
            yield

    def _sequence(self) -> Position:
        """In a transaction, whose commit is durable, whatever is usual for the role: the order is given out at once."""
        self._execute("insist")
        row: Any = self._execute("sequence").fetchone()
        if row is None and not self.inspect().is_accepted:
            raise UncheckedTimelineError(
                f"the server was promoted, and the reader of the change table {self._schema} has not seen yet whether it has everything"
            )
        if row is None:
            raise _missing(self._schema)
        return Position.of(row[0])

    def _read(self, name: LiteralString, **numbers: int) -> list[pa.StringArray]:
        literals = {key: sql.Literal(number) for key, number in numbers.items()}
        statement = sql.SQL(query("change_table", name)).format(schema=sql.Identifier(self._schema), **literals)
        with passing_bytes(self._connection):
            blocks = list(read_texts(self._connection, statement.as_string(self._connection), _COLUMNS))
        if len(blocks) == 1:
            return blocks[0]
        return [pa.concat_arrays([block[at] for block in blocks]) if blocks else pa.array([], pa.string()) for at in range(_COLUMNS)]

    def _execute(self, name: LiteralString, parameters: Mapping[str, object] | None = None) -> psycopg.Cursor[tuple[object, ...]]:
        try:
            return self._connection.execute(statement(name, self._schema), parameters)
        except psycopg.Error as error:
            if error.sqlstate in _MISSING:
                raise _missing(self._schema) from error
            raise


def own_schema(name: str) -> OwnSchema:
    """The schema of a change table."""
    return OwnSchema(name, _TABLES, ("note",))


def statement(name: LiteralString, schema: str, **parts: sql.Composable) -> sql.Composed:
    """A named statement for the capture whose schema this is."""
    return sql.SQL(query("change_table", name)).format(schema=sql.Identifier(schema), **parts)


def check_reader(state: TableState, held: Position, schema: str) -> None:
    """Raise unless a reader that has everything up to `held` can go on without missing a change.

    Every position is written down here before it is given out. So a change table that knows less than its reader is that of a server which
    was restored to an earlier time, or promoted before it had everything.
    """
    if held > state.ordered:
        raise SystemChangedError(
            f"changes were delivered up to {held}, and the change table {schema} knows only of those up to {state.ordered}: the server was "
            "restored to an earlier time, or lost its last commits when it was promoted",
            hint=_ANEW.format(schema),
        )
    if state.confirmed > held:
        raise PositionGapError(
            f"the change table {schema} begins at {state.confirmed}, but its reader has only what commits up to {held}",
            hint=_ANEW.format(schema),
        )


@contextmanager
def export_fence(address: SourceAddress, schema: str) -> Iterator[ExportedSnapshot]:
    """Hold a snapshot open for the length of the block, with the position at which it is exact. Waits for nobody's transaction.

    The reader of the change table goes on as soon as that position is known.
    """
    with connect(address, "penstock holder") as holder, holder.transaction():
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        with connect(address) as connection, source_errors("putting changes into order"):
            snapshot, fence = ChangeTable(connection, schema).sequence_under(lambda: _export(holder))
        yield ExportedSnapshot(snapshot, fence)


def _export(holder: Connection) -> str:
    row: Any = holder.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
    return str(row[0])


def _shape(row: Any) -> Shape:
    id_, root, space, name, names, *facts, key_names, columns = row
    # The columns of a partition are known by their names, which are the root's.
    places = {column: at for at, column in enumerate(columns)}
    ranks = [places.get(column, len(places) + at) for at, column in enumerate(names)]
    fields = tuple(Field(*each) for each in zip(names, *facts, ranks, strict=True))
    key = tuple(column for column in names if column in key_names)
    return Shape(id_, root, TableName(space, name), fields, key if len(key) == len(key_names) else ())


_ANEW = "DROP SCHEMA {} CASCADE; then start the capture, which sets it up anew, and copy the tables anew"


def _missing(schema: str) -> ChangeTableMissingError:
    return ChangeTableMissingError(
        f"the change table {schema} is not there: nothing writes down what changes",
        hint="let the capture set it up, or run the statements that its coverage report has; then copy the tables anew",
    )
