"""Which changes belong to the same row of the source, and which of them gave it each of its values.

Changes are grouped not by key but by *life*: a life begins with an insert, or after a delete, or was there before the epoch; an insert
that is half of a key change with unchanged values goes on with the life that the other half, the delete with the ordinal before it, ends.
Within a life an unchanged value is the last one that travelled; where none did, only the target has it, under the key of the life's first
change.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, ORDINAL, UNCHANGED, ChangeType
from penstock.postgres.types.arrays import Bools, as_bools

Rows = npt.NDArray[np.int64]
"""Numbers of rows of a table."""


def ints_of(column: pa.ChunkedArray) -> Rows:
    """A column of 64-bit numbers without nulls, as numpy sees it."""
    parts = [np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset : chunk.offset + len(chunk)] for chunk in column.chunks if len(chunk)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def bools_of(column: pa.ChunkedArray) -> Bools:
    parts = [as_bools(chunk) for chunk in column.chunks if len(chunk)]
    return np.concatenate(parts) if parts else np.empty(0, np.bool_)


def is_kind(changes: pa.Table, kind: ChangeType) -> Bools:
    return bools_of(pc.equal(changes.column(CHANGE_TYPE), pa.scalar(kind.value, pa.string())))


def firsts_and_lasts(codes: Rows) -> tuple[Rows, Rows]:
    """The first and the last row of every code, both in the order of the codes."""
    count = int(codes.max()) + 1 if len(codes) else 0
    first, last = np.full(count, -1), np.full(count, -1)
    rows = np.arange(len(codes))
    last[codes] = rows
    first[codes[::-1]] = rows[::-1]
    seen = last >= 0
    return first[seen], last[seen]


class Lives:
    """`changes` in the order of the log, no truncate among them; `codes` are the numbers of their keys."""

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
    def partial(self) -> frozenset[str]:
        """The columns of which some change lacks the value."""
        return frozenset(self._unchanged)

    def first(self, rows: Rows) -> Rows:
        """The first change of the life of each of `rows`."""
        return self._order[self._start[self._place[rows]]]

    def sources(self, rows: Rows, column: str | None = None) -> Rows:
        """The change that gave the value which the row has right after each of `rows`, or had before a delete; -1: none of the epoch.

        No column stands for all that are not `partial`.
        """
        travelled = ~self.is_delete
        if column in self._unchanged:
            travelled[self._unchanged[column]] = False
        latest = np.maximum.accumulate(np.where(travelled[self._order], np.arange(len(self.codes)), -1))
        places = self._place[rows]
        found = latest[places]
        return np.where(found >= self._start[places], self._order[found], -1)

    def _sorted(self) -> tuple[Rows, Bools]:
        """The changes life by life, and which of them, in that order, begins one."""
        order = np.argsort(self.codes, kind="stable")
        begins = self.is_insert[order] | differs(self.codes[order])
        # The insert between a delete and an update may have been refused.
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
        """Inserts that leave values behind, right after their other half."""
        if not self._unchanged:
            return np.empty(0, np.int64)
        inserts = np.flatnonzero(self.is_insert & bools_of(self.changes.column(UNCHANGED).is_valid()))
        inserts = inserts[inserts > 0]
        versions, ordinals = (ints_of(self.changes.column(name)) for name in (COMMIT_VERSION, ORDINAL))
        halves: Bools = (versions[inserts] == versions[inserts - 1]) & (ordinals[inserts] == ordinals[inserts - 1] + 1)
        halves &= self.is_delete[inserts - 1]
        return np.compress(halves, inserts)


def differs(values: Rows) -> Bools:
    """Which values are not the one before them."""
    differs = np.ones(len(values), np.bool_)
    differs[1:] = values[1:] != values[:-1]
    return differs


def unchanged_rows(column: pa.ChunkedArray) -> dict[str, Rows]:
    """By name of column, the rows in which `_unchanged` names it."""
    if column.null_count == len(column):
        return {}
    lengths = ints_of(pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64()))
    rows = np.repeat(np.arange(len(column)), lengths)
    names = pc.list_flatten(column)
    return {name: rows[bools_of(pc.equal(names, name))] for name in pc.unique(names).to_pylist()}
