"""A Postgres table as a dict, and the changes that its log would show.

The rows are the truth: nothing here applies a change. A sink that applies the changes must end with the same
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa

from penstock.change import (
    ChangeBatch,
    ChangeCounts,
    ChangeType,
    LogStep,
    PiecesCommitted,
    TransactionPiece,
    Transactions,
    change_schema,
)
from penstock.position import Position
from penstock.schema import TableSchema


class Value(NamedTuple):
    """The value of the typed column, and the exact text if the column cannot hold it."""

    typed: object
    text: str | None = None


NULL = Value(None)

Row = dict[str, Value]
Key = tuple[Value, ...]


@dataclass(frozen=True)
class Change:
    kind: ChangeType
    ordinal: int
    row: Row = field(default_factory=dict)
    unchanged: tuple[str, ...] = ()
    is_move: bool = False


@dataclass(frozen=True)
class Transaction:
    position: int
    changes: tuple[Change, ...]


class Source:
    """Rows by key. Each statement changes them, and adds the logged change to the open transaction."""

    def __init__(self, table: TableSchema, rows: Sequence[Row] = (), *, fence: int = 100) -> None:
        self.table = table
        self.fence = self.position = fence
        self.rows: dict[Key, Row] = {self._key(row): dict(row) for row in rows}
        self.log: list[Transaction] = []
        self.states: dict[int, list[Row]] = {fence: self.sorted_rows()}
        """The rows right after each commit."""
        self._open: list[Change] = []
        self._ordinal = 0

    def insert(self, row: Row) -> None:
        assert self._key(row) not in self.rows
        self.rows[self._key(row)] = dict(row)
        self._show(ChangeType.INSERT, row)

    def update(self, key: Key, values: Row, unchanged: Sequence[str] = ()) -> None:
        """Set `values`; a column in `unchanged` is unchanged TOAST. A key among `values` moves the row."""
        row = self.rows.pop(key)
        new = {**row, **values}
        assert self._key(new) not in self.rows
        assert not (set(unchanged) & {*values, *self.table.key})
        self.rows[self._key(new)] = new
        shown = {name: value for name, value in new.items() if name not in unchanged}
        if self._key(new) == key:
            self._show(ChangeType.UPDATE_POSTIMAGE, shown, unchanged)
        else:
            self._show(ChangeType.DELETE, self._key_row(key), is_move=True)
            self._show(ChangeType.INSERT, shown, unchanged)

    def delete(self, key: Key) -> None:
        del self.rows[key]
        self._show(ChangeType.DELETE, self._key_row(key))

    def truncate(self) -> None:
        self.rows.clear()
        self._show(ChangeType.TRUNCATE, {})

    def skip_ordinals(self, count: int) -> None:
        """Ordinals used by other tables in the same transaction."""
        self._ordinal += count

    def commit(self, distance: int = 10) -> int:
        self.position += distance
        self.log.append(Transaction(self.position, tuple(self._open)))
        self.states[self.position] = self.sorted_rows()
        self._open, self._ordinal = [], 0
        return self.position

    def sorted_rows(self) -> list[Row]:
        return sorted((dict(row) for row in self.rows.values()), key=repr)

    def _show(
        self, kind: ChangeType, row: Row, unchanged: Sequence[str] = (), *, is_move: bool = False
    ) -> None:
        self._open.append(Change(kind, self._ordinal, dict(row), tuple(unchanged), is_move))
        self._ordinal += 1

    def _key(self, row: Mapping[str, Value]) -> Key:
        return tuple(row[name] for name in self.table.key)

    def _key_row(self, key: Key) -> Row:
        return dict(zip(self.table.key, key, strict=True))


def own_arrays(table: TableSchema, rows: Sequence[Mapping[str, Value]]) -> list[pa.Array]:
    """The table's own columns; a missing value is null."""
    return [
        pa.array([row.get(column.name, NULL).typed for row in rows], column.arrow_type)
        for column in table.columns
    ]


def exact_of(row: Mapping[str, Value]) -> list[tuple[str, str]] | None:
    return [(name, value.text) for name, value in row.items() if value.text is not None] or None


def time_of(position: int) -> datetime:
    """Timestamps are not unique: two consecutive commits often share one."""
    return datetime(2025, 1, 1, tzinfo=UTC) + timedelta(seconds=position // 20)


def whole(table: TableSchema, transactions: Sequence[Transaction]) -> LogStep:
    """The transactions as one step of the log."""
    last = transactions[-1].position
    changes = [(each.position, change) for each in transactions for change in each.changes]
    batches = (_batch(table, changes),) if changes else ()
    return Transactions(batches, Position.of(last), time_of(last), len(transactions))


def in_pieces(table: TableSchema, transaction: Transaction, cuts: Sequence[int]) -> list[LogStep]:
    """The transaction as pieces that were sent before it committed, cut before these of its changes."""
    bounds = [0, *cuts, len(transaction.changes)]
    parts = [transaction.changes[low:high] for low, high in pairwise(bounds) if low < high]
    xid = transaction.position
    steps: list[LogStep] = [
        TransactionPiece(xid, (_batch(table, [(None, change) for change in part]),)) for part in parts
    ]
    return [*steps, PiecesCommitted(xid, Position.of(transaction.position), time_of(transaction.position))]


def _batch(table: TableSchema, changes: Sequence[tuple[int | None, Change]]) -> ChangeBatch:
    schema = change_schema(table)
    only = [change for _, change in changes]
    arrays = own_arrays(table, [change.row for change in only])
    metadata: list[list[object]] = [
        [change.kind for change in only],
        [position for position, _ in changes],
        [None if position is None else time_of(position) for position, _ in changes],
        [change.ordinal for change in only],
        [7] * len(only),
        [list(change.unchanged) or None for change in only],
        [exact_of(change.row) for change in only],
    ]
    arrays += [pa.array(values, schema.field(len(arrays) + at).type) for at, values in enumerate(metadata)]
    return ChangeBatch(table, pa.RecordBatch.from_arrays(arrays, schema=schema), _counts(only))


def _counts(changes: Sequence[Change]) -> ChangeCounts:
    kinds = [change.kind for change in changes]
    return ChangeCounts(
        inserts=kinds.count(ChangeType.INSERT),
        updates=kinds.count(ChangeType.UPDATE_POSTIMAGE),
        deletes=kinds.count(ChangeType.DELETE),
        truncates=kinds.count(ChangeType.TRUNCATE),
        moves=sum(change.is_move for change in changes),
        unchanged=sum(bool(change.unchanged) for change in changes),
        inexact=sum(exact_of(change.row) is not None for change in changes),
    )
