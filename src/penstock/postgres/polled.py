"""Asking a table for the rows that have changed since an earlier moment.

By `xmin`, the transaction that wrote a row, nothing is needed of the table and nothing is missed: whatever a moment does not see is written
by a transaction that is not older than the oldest one open at that moment. It reads the whole table each time. Rows carry 32 bits of that
number, so it is compared by its age, and only while fewer than two thousand million transactions lie in between.

By a column that goes up with every change (a time, a number from a sequence) an index does the work, and what is found depends on who
writes the column. A value may appear late, when its transaction commits; so a look goes back to below everything that transactions which
it did not see may still write (`open_transactions.py`).

Both ways some rows come again that an earlier look has given out. A version of a row is known by where it lies and who wrote it, so these
are told from new ones without a look at their values.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, LiteralString, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from penstock.errors import UnsupportedTableError
from penstock.postgres.chunks import reading
from penstock.postgres.connection import Connection
from penstock.postgres.copying import read_texts
from penstock.postgres.moments import Moment
from penstock.postgres.queries import identifier, query
from penstock.schema import TableName, TableSchema

_MOST_TRANSACTIONS = (1 << 31) - (1 << 20)
"""By how many a row's number may lie back for its age to be told."""

_SHOWN: dict[str, LiteralString] = {
    "timestamp with time zone": "least({column}, now()) - interval '5 seconds'",
    "timestamp without time zone": "{column} - interval '5 seconds'",
}
"""What counts as the highest value of a time: not more than now, and some seconds less. A transaction has its time a moment before others
can know of it, and clocks are set back."""


@dataclass(frozen=True, slots=True)
class CursorColumn:
    """A column that goes up with every change of a row."""

    name: str
    type_name: str
    """As SQL writes it."""


@dataclass(frozen=True, slots=True)
class PolledTable:
    """A table, and what it is asked by: a column, or `xmin` if that is None."""

    schema: TableSchema
    is_partitioned: bool
    cursor: CursorColumn | None = None

    @property
    def how(self) -> str:
        """In words that change when the way of asking does."""
        return "xmin" if self.cursor is None else f"{self.cursor.name} {self.cursor.type_name}"


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that may have changed: those written by transaction `horizon` or later, or with a cursor of `low` or more; None: no bound."""

    low: str | None = None
    horizon: int | None = None

    @property
    def is_everything(self) -> bool:
        return self.low is None and self.horizon is None


EVERYTHING = Window()


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Some rows as texts, each with the name of its version, and whether the next look finds it again if nobody changes it."""

    versions: pa.StringArray
    comes_again: pa.BooleanArray
    texts: list[pa.StringArray] = field(default_factory=list)
    is_before: list[pa.BooleanArray] = field(default_factory=list)
    """For each of the horizons that were asked for, whether an older transaction wrote the version."""

    def filter(self, mask: pa.BooleanArray) -> RowBlock:
        return RowBlock(
            self.versions.filter(mask),
            self.comes_again.filter(mask),
            [text.filter(mask) for text in self.texts],
            [each.filter(mask) for each in self.is_before],
        )

    def without(self, versions: pa.StringArray) -> RowBlock:
        """Without rows that are known already."""
        return self.filter(pc.invert(pc.is_in(self.versions, versions))) if len(versions) else self


def read_window(
    connection: Connection, table: PolledTable, window: Window, following: Window, moment: Moment, *, horizons: Sequence[int] = ()
) -> Generator[RowBlock]:
    """The rows of `window` that the transaction of `moment` sees; `following` is where the next look will begin."""
    columns = sql.SQL(", ").join([sql.SQL("t.{}").format(sql.Identifier(name)) for name in table.schema.column_names])
    before = [sql.SQL("NOT ({})").format(_written_since(horizon, moment)) for horizon in horizons]
    statement = sql.SQL("SELECT {facts}, {columns} FROM {rows} WHERE {wanted}").format(
        facts=sql.SQL(", ").join([_VERSION, window_condition(table, following, moment), *before]),
        columns=columns,
        rows=_rows(table),
        wanted=window_condition(table, window, moment),
    )
    with reading(table.schema.name):
        for texts in read_texts(connection, statement.as_string(), 2 + len(before) + len(table.schema.columns)):
            comes_again, *is_before = [pc.equal(text, "t") for text in texts[1 : 2 + len(before)]]
            yield RowBlock(texts[0], comes_again, texts[2 + len(before) :], is_before)


def read_versions(connection: Connection, table: PolledTable, window: Window, moment: Moment, most: int) -> pa.StringArray:
    """The names of the row versions in a window, of so many at most."""
    statement = sql.SQL("SELECT {} FROM {} WHERE {} LIMIT {}").format(
        _VERSION, _rows(table), window_condition(table, window, moment), sql.Literal(most)
    )
    with reading(table.schema.name):
        blocks = [texts[0] for texts in read_texts(connection, statement.as_string(), 1)]
    return pa.concat_arrays(blocks) if blocks else pa.array([], pa.string())


def inspect_highest(connection: Connection, table: PolledTable) -> str | None:
    """The highest value of the cursor, as text; of a time, a little less. None if there is no row."""
    assert table.cursor is not None
    column = sql.SQL("t.{}").format(sql.Identifier(table.cursor.name))
    shown = sql.SQL(_SHOWN.get(table.cursor.type_name, "{column}")).format(column=column)
    # Not by max, which some types lack that have an order; and not cast to text, which might be a function of the type's owner.
    statement = sql.SQL("SELECT {} FROM {} ORDER BY {} DESC LIMIT 1").format(shown, _rows(table), column)
    with reading(table.schema.name):
        found = [text for texts in read_texts(connection, statement.as_string(), 1) for text in texts[0].to_pylist()]
    return found[0] if found else None


def read_keys_in_order(connection: Connection, table: PolledTable) -> Iterator[list[pa.StringArray]]:
    """Every key there is: a number made of it, by which they are in order; the key in one text; and a text for each of its columns."""
    keys = [sql.SQL("t.{}").format(sql.Identifier(name)) for name in table.schema.key]
    whole = sql.SQL('(ROW({})::text COLLATE "C")').format(sql.SQL(", ").join(keys))
    statement = sql.SQL("SELECT hashtextextended({whole}, 0), {whole}, {keys} FROM {rows} ORDER BY 1").format(
        whole=whole, keys=sql.SQL(", ").join(keys), rows=_rows(table)
    )
    with reading(table.schema.name):
        yield from read_texts(connection, statement.as_string(), 2 + len(keys))


CursorFacts: TypeAlias = tuple[str, bool, bool]
"""Of a column: its type as SQL writes it, whether it is never NULL, whether its values have an order."""


def inspect_cursors(connection: Connection, oids: Sequence[int]) -> dict[tuple[int, str], CursorFacts]:
    """Of all columns of these tables, by OID and name."""
    rows: list[Any] = connection.execute(query("polling", "cursor_columns"), {"oids": list(oids)}).fetchall()
    return {(oid, name): (type_name, is_filled, is_ordered) for oid, name, type_name, is_filled, is_ordered in rows}


def check_cursor(table: TableName, column: str, found: CursorFacts | None) -> CursorColumn:
    """Raise the error that names why a table cannot be asked by this column, if there is a reason."""
    if found is None:
        raise UnsupportedTableError(f"table {table} has no column {column!r} to be asked by", hint="name one of its columns, or xmin")
    type_name, is_filled, is_ordered = found
    if not is_ordered:
        raise UnsupportedTableError(
            f"column {column!r} of {table} is of type {type_name}, whose values have no order", hint="name another column, or xmin"
        )
    if not is_filled:
        alter = f"ALTER TABLE {identifier(table.schema, table.name)} ALTER {identifier(column)} SET NOT NULL;"
        raise UnsupportedTableError(f"column {column!r} of {table} may be NULL, and rows without it would never be found", hint=alter)
    return CursorColumn(column, type_name)


_VERSION = sql.SQL("concat(t.tableoid, t.ctid, ':', t.xmin)")


def _rows(table: PolledTable) -> sql.Composed:
    name = sql.Identifier(table.schema.name.schema, table.schema.name.name)
    return sql.SQL("{}{} AS t").format(sql.SQL("" if table.is_partitioned else "ONLY "), name)


def window_condition(table: PolledTable, window: Window, moment: Moment) -> sql.Composable:
    """On rows of `t`, whether they are in the window."""
    if table.cursor is None:
        return _written_since(window.horizon, moment)
    if window.low is None:
        return sql.SQL("true")
    changed = sql.SQL("t.{} >= CAST({} AS {})").format(
        sql.Identifier(table.cursor.name), sql.Literal(window.low), sql.SQL(table.cursor.type_name)
    )
    return changed if window.horizon is None else sql.SQL("({} OR {})").format(changed, _written_since(window.horizon, moment))


def _written_since(horizon: int | None, moment: Moment) -> sql.Composable:
    """Too long ago to be told, or from a future that this server never had: everything."""
    if horizon is None or not 0 <= moment.xmax - horizon < _MOST_TRANSACTIONS:
        return sql.SQL("true")
    number = sql.Literal(str(horizon & 0xFFFF_FFFF))
    # A row that was written too long ago seems to be of the future: it is frozen, and keeps the number that it had.
    return sql.SQL("age(t.xmin) BETWEEN 0 AND age({}::xid)").format(number)
