"""A plain model of a table in every mode: dicts, one statement after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from typing_extensions import override

from penstock.change import EXACT, METADATA_FIELDS, ChangeType
from penstock.schema import TableSchema
from penstock.sinks.fold import COUNT, Outcome
from penstock.sinks.modes import (
    CURRENT,
    DELETED,
    DELETED_AT,
    VALID_FROM,
    VALID_FROM_TIME,
    VALID_TO,
    VALID_TO_TIME,
    Layout,
    Mode,
)
from tests.support.sinks.source import Change, Key, Row, Source, Transaction, exact_of, own_arrays, time_of

Record = dict[str, Any]
"""A row as pyarrow returns it."""


class SourceModel(Source):
    """A source that also knows the history of every row, and the rows of each key at each commit."""

    def __init__(self, table: TableSchema, rows: Sequence[Row] = (), *, fence: int = 100) -> None:
        super().__init__(table, rows, fence=fence)
        self._deleted: dict[Key, Row] = {}
        self._deleted_at: dict[Key, int | None] = {}
        self._touched: set[Key] = set()
        self._versions: list[Record] = []
        self._current: dict[Key, Record] = {}
        for key, row in self.rows.items():
            self._open_version(key, row, fence)
        self.soft_deleted = {fence: self._soft_deleted_rows()}
        self.versions = {fence: self._version_rows()}

    @override
    def insert(self, row: Row) -> None:
        super().insert(row)
        self._came(self._key(row))

    @override
    def update(self, key: Key, values: Row, unchanged: Sequence[str] = ()) -> None:
        old = self.rows[key]
        super().update(key, values, unchanged)
        new = self._key({**old, **values})
        if new != key:
            self._went(key, old)
        self._came(new)

    @override
    def delete(self, key: Key) -> None:
        row = self.rows[key]
        super().delete(key)
        self._went(key, row)

    @override
    def truncate(self) -> None:
        rows = dict(self.rows)
        super().truncate()
        for key, row in rows.items():
            self._went(key, row)

    @override
    def commit(self, distance: int = 10) -> int:
        position = super().commit(distance)
        self._deleted_at = {key: at or position for key, at in self._deleted_at.items()}
        for key in self._touched:
            current = self._current.pop(key, None)
            if current is not None:
                current.update({VALID_TO: position, VALID_TO_TIME: time_of(position), CURRENT: False})
            if key in self.rows:
                self._open_version(key, self.rows[key], position)
        self._touched.clear()
        self.soft_deleted[position] = self._soft_deleted_rows()
        self.versions[position] = self._version_rows()
        return position

    def expected(self, mode: Mode, position: int) -> list[Record]:
        if mode is Mode.SOFT_DELETE:
            return self.soft_deleted[position]
        if mode is Mode.HISTORY:
            return self.versions[position]
        return [record_of(row) for row in self.states[position]]

    def _came(self, key: Key) -> None:
        self._touched.add(key)
        self._deleted.pop(key, None)
        self._deleted_at.pop(key, None)

    def _went(self, key: Key, row: Row) -> None:
        self._touched.add(key)
        self._deleted[key], self._deleted_at[key] = dict(row), None

    def _open_version(self, key: Key, row: Row, position: int) -> None:
        version = {
            **record_of(row),
            VALID_FROM: position,
            VALID_FROM_TIME: time_of(position),
            VALID_TO: None,
            VALID_TO_TIME: None,
            CURRENT: True,
        }
        self._versions.append(version)
        self._current[key] = version

    def _soft_deleted_rows(self) -> list[Record]:
        live = [{**record_of(row), DELETED: False, DELETED_AT: None} for row in self.rows.values()]
        times = {key: None if at is None else time_of(at) for key, at in self._deleted_at.items()}
        return live + [
            {**record_of(row), DELETED: True, DELETED_AT: times[key]} for key, row in self._deleted.items()
        ]

    def _version_rows(self) -> list[Record]:
        return [dict(version) for version in self._versions]


class Heap:
    """A table without key and with replica identity FULL: rows are indistinguishable, and every change has
    the old row.
    """

    def __init__(self, table: TableSchema, rows: Sequence[Row]) -> None:
        self.table = table
        self.rows = list(rows)
        self.position = self.fence = 100
        self.log: list[Transaction] = []
        self.states = {self.position: list(self.rows)}
        self._open: list[Change] = []

    def insert(self, row: Row) -> None:
        self.rows.append(row)
        self._show(ChangeType.INSERT, row)

    def delete(self, at: int) -> None:
        self._show(ChangeType.DELETE, self.rows.pop(at))

    def update(self, at: int, row: Row) -> None:
        self.delete(at)
        self.insert(row)

    def truncate(self) -> None:
        self.rows = []
        self._show(ChangeType.TRUNCATE, {})

    def commit(self) -> None:
        self.position += 10
        self.log.append(Transaction(self.position, tuple(self._open)))
        self.states[self.position] = list(self.rows)
        self._open = []

    def expected(self, position: int) -> list[Record]:
        return [record_of(row) for row in self.states[position]]

    def _show(self, kind: ChangeType, row: Row) -> None:
        self._open.append(Change(kind, len(self._open), row))


def record_of(row: Row) -> Record:
    return {**{name: value.typed for name, value in row.items()}, EXACT: exact_of(row)}


def changes_table(table: TableSchema, transactions: Sequence[Transaction]) -> pa.Table:
    """The changes in the form of `read_slices`."""
    changes = [(each.position, change) for each in transactions for change in each.changes]
    only = [change for _, change in changes]
    metadata: list[list[object]] = [
        [change.kind.value for change in only],
        [position for position, _ in changes],
        [time_of(position) for position, _ in changes],
        [change.ordinal for change in only],
        [position for position, _ in changes],
        [list(change.unchanged) or None for change in only],
        [exact_of(change.row) for change in only],
    ]
    fields = [pa.field(field.name, field.type) for field in METADATA_FIELDS]
    columns = [pa.field(column.name, column.arrow_type) for column in table.columns]
    arrays = own_arrays(table, [change.row for change in only])
    arrays += [pa.array(values, field.type) for values, field in zip(metadata, fields, strict=True)]
    return pa.table(arrays, schema=pa.schema([*columns, *fields]))


class PlainTarget:
    """A target that is a list.

    Applies outcomes one row at a time, and answers lookups by a scan of all rows.
    """

    def __init__(self, layout: Layout, rows: Sequence[Record]) -> None:
        self.layout = layout
        self.rows = list(rows)
        self.lookups = 0

    def lookup(self, keys: pa.Table | None) -> pa.Table:
        self.lookups += 1
        rows = [row for row in self.rows if self.layout.mode is not Mode.HISTORY or row[CURRENT]]
        if keys is not None:
            names = [name for name in self.layout.columns.names if name in keys.column_names]
            wanted = {self.name(row, names) for row in keys.to_pylist()}
            assert len(wanted) == keys.num_rows, "no key is looked up twice"
            rows = [row for row in rows if self.name(row, names) in wanted]
        return pa.Table.from_pylist(rows, self.layout.schema)

    def apply(self, outcome: Outcome) -> None:
        assert outcome.rows.schema.equals(self.layout.schema)
        if outcome.emptied:
            self.rows = []
        deleted = outcome.deleted.to_pylist()
        if self.layout.key:
            assert (
                outcome.deleted.column_names == [*self.layout.identity, EXACT]
                or self.layout.mode is Mode.APPEND
            )
            names = {self.name(row, self.layout.identity) for row in deleted}
            assert len(names) == len(deleted), "no row is deleted twice"
            self.rows = [row for row in self.rows if self.name(row, self.layout.identity) not in names]
        else:
            self._take_out(deleted)
        self.rows += outcome.rows.to_pylist()

    def _take_out(self, deleted: list[Record]) -> None:
        names = self.layout.columns.names
        for row in deleted:
            assert row[COUNT] > 0
            for _ in range(row[COUNT]):
                at = next(
                    at for at, each in enumerate(self.rows) if self.name(each, names) == self.name(row, names)
                )
                del self.rows[at]

    def name(self, row: Record, names: Sequence[str]) -> tuple[object, ...]:
        texts = dict(row[EXACT] or [])
        return tuple((_comparable(row[name]), texts.get(name)) for name in names)


def _comparable(value: object) -> object:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return repr(value) if isinstance(value, (list, dict)) else value


def canonical(rows: Sequence[Record], layout: Layout) -> list[str]:
    """Rows in a fixed order, for comparing."""
    assert all(row[EXACT] is None or row[EXACT] for row in rows), (
        "an empty map says nothing that a null does not"
    )
    typed = pa.Table.from_pylist(rows, layout.schema).to_pylist()
    return sorted(repr(sorted({**row, EXACT: sorted(row[EXACT] or [])}.items())) for row in typed)
