"""Chains of changes to one row, which may include key changes; and rows that are gathered in slices of
bounded size.

Changes are grouped by *chain* instead of by key. A chain begins with an insert, with the first change after a
delete, or with the first change to a row of the target. A key change with unchanged values is a delete of the
old key, followed by an insert of the new key with the next ordinal. Such an insert begins no chain: it
continues the chain of the delete. Within a chain, an unchanged value is the last value that was sent. If none
was sent, only the target has the value, in the row with the key of the chain's first change.

An Arrow `string` array holds at most 2 GiB, and a Postgres value up to 1 GB, so two values may exceed one
array. Rows of the target may be much larger than their changes. Therefore the sizes of rows are computed
before the rows are gathered, slices have at most `SLICE_BYTES`, and arrays at most `_ARRAY_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Bools, as_arrow, as_bools
from penstock.change import CHANGE_TYPE, COMMIT_VERSION, ORDINAL, UNCHANGED, ChangeType

Rows = npt.NDArray[np.int64]
"""Row numbers of a table."""


def ints_of(column: pa.ChunkedArray) -> Rows:
    """A column of 64-bit numbers without nulls, as a numpy array."""
    parts = [
        np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def bools_of(column: pa.ChunkedArray) -> Bools:
    parts = [as_bools(chunk) for chunk in column.chunks if len(chunk)]
    return np.concatenate(parts) if parts else np.empty(0, np.bool_)


def is_kind(changes: pa.Table, kind: ChangeType) -> Bools:
    return bools_of(pc.equal(changes.column(CHANGE_TYPE), pa.scalar(kind.value, pa.string())))


def firsts_and_lasts(codes: Rows) -> tuple[Rows, Rows]:
    """Return the first row and the last row with each code, both in the order of the codes."""
    count = int(codes.max()) + 1 if len(codes) else 0
    first, last = np.full(count, -1), np.full(count, -1)
    rows = np.arange(len(codes))
    last[codes] = rows
    first[codes[::-1]] = rows[::-1]
    seen = last >= 0
    return first[seen], last[seen]


class RowChains:
    """The chains of `changes`, which are in commit order and contain no truncates. `codes` has the code of
    each change's key (see `key_codes`).
    """

    def __init__(self, changes: pa.Table, codes: Rows) -> None:
        self.changes = changes
        self.codes = codes
        self.is_insert = is_kind(changes, ChangeType.INSERT)
        self.is_delete = is_kind(changes, ChangeType.DELETE)
        self._unchanged = unchanged_rows(changes.column(UNCHANGED))
        self._order, begins = self._sorted()
        self._place = np.empty(len(codes), np.int64)
        self._place[self._order] = np.arange(len(codes))
        self._start = np.maximum.accumulate(np.where(begins, np.arange(len(codes)), 0))

    @property
    def incomplete_columns(self) -> frozenset[str]:
        """The columns whose value is missing from at least one change."""
        return frozenset(self._unchanged)

    def first(self, rows: Rows) -> Rows:
        """The first change of the chain of each of `rows`."""
        return self._order[self._start[self._place[rows]]]

    def sources(self, rows: Rows, column: str | None = None) -> Rows:
        """For each change in `rows`, the change that carries the value which the row has right after it (for
        a delete: right before it); -1 if no change of the epoch carries it.

        With `column`, this is the value of that column. Without, the result applies to all columns that are
        not in `incomplete_columns`.
        """
        travelled = ~self.is_delete
        if column in self._unchanged:
            travelled[self._unchanged[column]] = False
        latest = np.maximum.accumulate(np.where(travelled[self._order], np.arange(len(self.codes)), -1))
        places = self._place[rows]
        found = latest[places]
        return np.where(found >= self._start[places], self._order[found], -1)

    def _sorted(self) -> tuple[Rows, Bools]:
        """Return the changes ordered by chain, and for each of them whether it begins a chain."""
        order = np.argsort(self.codes, kind="stable")
        begins = self.is_insert[order] | differs(self.codes[order])
        # A change after a delete begins a chain even if it is an update, because the insert between them may
        # have been rejected.
        begins[1:] |= self.is_delete[order][:-1] & ~self.is_delete[order][1:]
        moved = self._moved()
        if not len(moved):
            return order, begins
        life = np.empty(len(order), np.int64)
        life[order] = np.cumsum(begins) - 1
        before = np.arange(np.count_nonzero(begins))
        before[life[moved]] = life[moved - 1]
        while not np.array_equal(before, before[before]):
            before = before[before]
        life = before[life]
        order = np.argsort(life, kind="stable")
        return order, differs(life[order])

    def _moved(self) -> Rows:
        """Return the inserts with unchanged values that directly follow the delete of the same key change."""
        if not self._unchanged:
            return np.empty(0, np.int64)
        inserts = np.flatnonzero(self.is_insert & bools_of(self.changes.column(UNCHANGED).is_valid()))
        inserts = inserts[inserts > 0]
        versions, ordinals = (ints_of(self.changes.column(name)) for name in (COMMIT_VERSION, ORDINAL))
        halves: Bools = (versions[inserts] == versions[inserts - 1]) & (
            ordinals[inserts] == ordinals[inserts - 1] + 1
        )
        halves &= self.is_delete[inserts - 1]
        return np.compress(halves, inserts)


def differs(values: Rows) -> Bools:
    """A mask of the values that differ from the value before them. The first value always counts as
    different.
    """
    differs = np.ones(len(values), np.bool_)
    differs[1:] = values[1:] != values[:-1]
    return differs


def unchanged_rows(column: pa.ChunkedArray) -> dict[str, Rows]:
    """The rows whose `_unchanged` names a column, by the name of that column."""
    if column.null_count == len(column):
        return {}
    lengths = ints_of(pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64()))
    rows = np.repeat(np.arange(len(column)), lengths)
    names = pc.list_flatten(column)
    return {name: rows[bools_of(pc.equal(names, name))] for name in pc.unique(names).to_pylist()}


SLICE_BYTES = 64 << 20
"""Maximum size of the rows that are built at a time, except for a single larger row."""

_ARRAY_BYTES = 1 << 30
"""Maximum size of one gathered array, except for a single larger value."""
_FIXED_BYTES = 16

Sizes = npt.NDArray[np.float64]


def take(table: pa.Table, rows: Rows) -> pa.Table:
    return pa.table([gather(column, rows) for column in table.columns], schema=table.schema)


def gather(column: pa.ChunkedArray, rows: Rows) -> pa.ChunkedArray:
    """Like `column.take(rows)`, which fails if the column's string chunks exceed 2 GiB together."""
    sizes = value_sizes(column)[rows]
    if sizes.sum() <= _ARRAY_BYTES and (column.num_chunks == 1 or column.nbytes < _ARRAY_BYTES):
        return column.take(as_arrow(rows, pa.int64()))
    pieces = [piece for low, high in _cuts(sizes, _ARRAY_BYTES) for piece in _gather(column, rows[low:high])]
    return pa.chunked_array(pieces, column.type)


def _gather(column: pa.ChunkedArray, rows: Rows) -> list[pa.Array]:
    """Gather values that fit into one array together. Returns one array; or one array for each chunk, if
    `rows` are in the order of the chunks.
    """
    starts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])
    chunks = np.searchsorted(starts, rows, "right") - 1
    order = np.argsort(chunks, kind="stable")
    used, firsts = np.unique(chunks[order], return_index=True)
    runs = np.split(order, firsts[1:])
    pieces = [
        column.chunk(at).take(as_arrow(rows[run] - starts[at], pa.int64()))
        for at, run in zip(used.tolist(), runs, strict=True)
    ]
    if np.array_equal(order, np.arange(len(order))):
        return pieces
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return [pa.concat_arrays(pieces).take(as_arrow(back, pa.int64()))]


def value_sizes(column: pa.ChunkedArray) -> Sizes:
    """The approximate size of each value in bytes."""
    kind = column.type
    if (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    ):
        lengths = [
            np.asarray(pc.fill_null(pc.binary_length(chunk), 0), np.float64) for chunk in column.chunks
        ]
        return np.concatenate([np.empty(0), *lengths]) + 4
    fixed = _FIXED_BYTES if not pa.types.is_nested(kind) else column.nbytes / max(len(column), 1)
    return np.full(len(column), float(fixed))


def row_sizes(table: pa.Table) -> Sizes:
    sizes = np.zeros(table.num_rows)
    for column in table.columns:
        sizes += value_sizes(column)
    return sizes


def _cuts(sizes: Sizes, limit: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of runs of rows. A run has at most `limit` bytes, or is one larger row."""
    ends = np.cumsum(sizes)
    low = 0
    while low < len(sizes):
        before = ends[low - 1] if low else 0.0
        high = max(int(np.searchsorted(ends, before + limit, "right")), low + 1)
        yield low, high
        low = high


@dataclass(frozen=True, slots=True, eq=False)
class NewRows:
    """Rows to insert, which are built one slice at a time. Each of `parts` has the sizes of its rows, and a
    function that builds rows from their numbers.
    """

    schema: pa.Schema
    parts: tuple[tuple[Sizes, Callable[[Rows], pa.Table]], ...] = ()

    @classmethod
    def of(cls, table: pa.Table) -> NewRows:
        def build(rows: Rows) -> pa.Table:
            return table.slice(int(rows[0]), len(rows))

        return cls(table.schema, ((row_sizes(table), build),) if table.num_rows else ())

    @property
    def count(self) -> int:
        return sum(len(sizes) for sizes, _ in self.parts)

    def slices(self) -> Iterator[pa.Table]:
        for sizes, build in self.parts:
            for low, high in _cuts(sizes, SLICE_BYTES):
                yield build(np.arange(low, high))

    def whole(self) -> pa.Table:
        return pa.concat_tables([self.schema.empty_table(), *self.slices()])

    def __add__(self, other: NewRows) -> NewRows:
        return NewRows(self.schema, (*self.parts, *other.parts))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows that were requested from one row group of a file: their number, the approximate size in bytes
    of each, and a function that reads the given columns of all of them.
    """

    count: int
    size: float
    load: Callable[[Sequence[str]], pa.Table]


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Rows of the target that a lookup found. `known` has at least the columns that identify the rows; `read`
    reads whole rows on demand.
    """

    known: pa.Table
    numbers: Rows
    """For each row of `known`, the row number to pass to `read`."""
    sizes: Sizes
    """For each row of `known`, the approximate size in bytes of the whole row."""
    read: Callable[[Rows], pa.Table]

    @classmethod
    def of(cls, table: pa.Table) -> StoredRows:
        return cls(table, np.arange(table.num_rows), row_sizes(table), lambda rows: take(table, rows))

    @classmethod
    def load(cls, groups: Sequence[RowGroup], schema: pa.Schema, known: Sequence[str]) -> StoredRows:
        """Load the rows of `groups`. If there are few, all columns are read. If there are many, only the
        columns `known` are read now, and whole rows on demand.
        """

        def tables(names: Sequence[str]) -> pa.Table:
            empty = pa.schema([schema.field(name) for name in names]).empty_table()
            return pa.concat_tables([empty, *(group.load(names).select(names) for group in groups)])

        if sum(group.count * group.size for group in groups) <= SLICE_BYTES:
            return cls.of(tables(schema.names))
        counts = [group.count for group in groups]
        starts = np.cumsum([0, *counts])

        def read(rows: Rows) -> pa.Table:
            """Read whole rows. Each row group is read only once if the rows are in order."""
            parts = [schema.empty_table()]
            at = np.searchsorted(starts, rows, "right") - 1
            bounds = [0, *(np.flatnonzero(at[1:] != at[:-1]) + 1).tolist(), len(rows)] if len(rows) else [0]
            for low, high in pairwise(bounds):
                group = int(at[low])
                parts.append(
                    take(
                        groups[group].load(schema.names).select(schema.names), rows[low:high] - starts[group]
                    )
                )
            return pa.concat_tables(parts)

        return cls(
            tables(known), np.arange(sum(counts)), np.repeat([group.size for group in groups], counts), read
        )

    def only(self, wanted: npt.NDArray[np.bool_]) -> StoredRows:
        at = np.flatnonzero(wanted)
        return (
            self
            if len(at) == len(wanted)
            else StoredRows(take(self.known, at), self.numbers[at], self.sizes[at], self.read)
        )

    def take(self, rows: Rows) -> pa.Table:
        """Return whole rows. `rows` are indexes in `known`."""
        return self.read(self.numbers[rows])
