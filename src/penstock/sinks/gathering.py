"""Rows gathered in slices of bounded size, from tables and from row groups of files.

Arrow's `string` arrays hold 2 GiB each, and Postgres values up to 1 GB, so two values may be too many for one array; and rows that an epoch
needs from the target may be much larger than its changes. So sizes are known before rows are gathered, and no array exceeds a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.arrays import as_arrow
from penstock.sinks.lives import Rows

SLICE_BYTES = 64 << 20
"""Rows that are built at a time, but for a single row that is larger."""

_ARRAY_BYTES = 1 << 30
"""One array that is gathered, but for a single value that is larger."""
_FIXED_BYTES = 16

Sizes = npt.NDArray[np.float64]


def take(table: pa.Table, rows: Rows) -> pa.Table:
    return pa.table([gather(column, rows) for column in table.columns], schema=table.schema)


def gather(column: pa.ChunkedArray, rows: Rows) -> pa.ChunkedArray:
    """`column.take`, which fails where chunks of texts exceed 2 GiB together."""
    if column.num_chunks == 1 or column.nbytes < _ARRAY_BYTES:
        size = column.nbytes / max(len(column), 1) * len(rows)
        if size < _ARRAY_BYTES:
            return column.take(as_arrow(rows, pa.int64()))
    sizes = value_sizes(column)[rows]
    pieces = [piece for low, high in _cuts(sizes, _ARRAY_BYTES) for piece in _gather(column, rows[low:high])]
    return pa.chunked_array(pieces, column.type)


def _gather(column: pa.ChunkedArray, rows: Rows) -> list[pa.Array]:
    """Few enough values for one array, from the chunks that have them."""
    starts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])
    chunks = np.searchsorted(starts, rows, "right") - 1
    order = np.argsort(chunks, kind="stable")
    used, firsts = np.unique(chunks[order], return_index=True)
    runs = np.split(order, firsts[1:])
    pieces = [column.chunk(at).take(as_arrow(rows[run] - starts[at], pa.int64())) for at, run in zip(used.tolist(), runs, strict=True)]
    if np.array_equal(order, np.arange(len(order))):
        return pieces
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return [pa.concat_arrays(pieces).take(as_arrow(back, pa.int64()))]


def value_sizes(column: pa.ChunkedArray) -> Sizes:
    """About how many bytes each value takes."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        lengths = [np.asarray(pc.fill_null(pc.binary_length(chunk), 0), np.float64) for chunk in column.chunks]
        return np.concatenate([np.empty(0), *lengths]) + 4
    fixed = _FIXED_BYTES if not pa.types.is_nested(kind) else column.nbytes / max(len(column), 1)
    return np.full(len(column), float(fixed))


def row_sizes(table: pa.Table) -> Sizes:
    sizes = np.zeros(table.num_rows)
    for column in table.columns:
        sizes += value_sizes(column)
    return sizes


def _cuts(sizes: Sizes, limit: int) -> Iterator[tuple[int, int]]:
    """Runs of rows that together take `limit` bytes at most, or one row each."""
    ends = np.cumsum(sizes)
    low = 0
    while low < len(sizes):
        before = ends[low - 1] if low else 0.0
        high = max(int(np.searchsorted(ends, before + limit, "right")), low + 1)
        yield low, high
        low = high


@dataclass(frozen=True, slots=True, eq=False)
class NewRows:
    """Rows to insert, built a slice at a time. `parts`: for each row its size, and the function that builds rows by their numbers."""

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
    """Rows of one row group of a file that are wanted: how many, about how large each is, and how to read columns of them."""

    count: int
    size: float
    load: Callable[[Sequence[str]], pa.Table]


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Rows of the target that a lookup found: `known` columns tell them apart and are there, whole rows are read when they are needed."""

    known: pa.Table
    numbers: Rows
    """Of the rows in `known`, as `read` numbers them."""
    sizes: Sizes
    """Of the same rows."""
    read: Callable[[Rows], pa.Table]

    @classmethod
    def of(cls, table: pa.Table) -> StoredRows:
        return cls(table, np.arange(table.num_rows), row_sizes(table), lambda rows: take(table, rows))

    @classmethod
    def load(cls, groups: Sequence[RowGroup], schema: pa.Schema, known: Sequence[str]) -> StoredRows:
        """Few rows are read at once, of many at first the columns `known`."""

        def tables(names: Sequence[str]) -> pa.Table:
            empty = pa.schema([schema.field(name) for name in names]).empty_table()
            return pa.concat_tables([empty, *(group.load(names).select(names) for group in groups)])

        if sum(group.count * group.size for group in groups) <= SLICE_BYTES:
            return cls.of(tables(schema.names))
        counts = [group.count for group in groups]
        starts = np.cumsum([0, *counts])

        def read(rows: Rows) -> pa.Table:
            """A row group is read once if the rows are in order."""
            parts = [schema.empty_table()]
            at = np.searchsorted(starts, rows, "right") - 1
            bounds = [0, *(np.flatnonzero(at[1:] != at[:-1]) + 1).tolist(), len(rows)] if len(rows) else [0]
            for low, high in pairwise(bounds):
                group = int(at[low])
                parts.append(take(groups[group].load(schema.names).select(schema.names), rows[low:high] - starts[group]))
            return pa.concat_tables(parts)

        return cls(tables(known), np.arange(sum(counts)), np.repeat([group.size for group in groups], counts), read)

    def only(self, wanted: npt.NDArray[np.bool_]) -> StoredRows:
        at = np.flatnonzero(wanted)
        return self if len(at) == len(wanted) else StoredRows(take(self.known, at), self.numbers[at], self.sizes[at], self.read)

    def take(self, rows: Rows) -> pa.Table:
        """Whole rows, by their place in `known`."""
        return self.read(self.numbers[rows])
