"""Rows that keep being added to, in Arrow, each found by its place.

They lie in a few pieces, of which each is larger than all that come after it: adding a row now and then copies little, and taking a few
rows touches only these, however many there are.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa


class RowPieces:
    """Rows of one schema, numbered from 0 in the order in which they came."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._pieces: list[pa.Table] = []
        self._starts: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, rows: pa.RecordBatch) -> int:
        """Keep rows; gives the place of the first."""
        first = self._count
        if rows.num_rows:
            self._pieces.append(pa.Table.from_arrays(rows.columns, schema=self._schema))
            self._starts.append(first)
            self._count += rows.num_rows
            self._join()
        return first

    def take(self, places: pa.Int64Array) -> pa.Table:
        """The rows at these places, in this order; a row of nulls where a place is null."""
        wanted = places.drop_null().to_numpy()
        owners = np.searchsorted(self._starts, wanted, side="right") - 1
        order = np.argsort(owners, kind="stable")
        found = [
            piece.take(pa.array(wanted[order][owners[order] == number] - start))
            for number, (piece, start) in enumerate(zip(self._pieces, self._starts, strict=True))
            if (owners == number).any()
        ]
        rows = pa.concat_tables([self._schema.empty_table(), *found]).combine_chunks()
        # Row i of `rows` is the one that was wanted at order[i]; nulls go where they were.
        where = np.full(len(places), -1, np.int64)
        at = np.empty(len(wanted), np.int64)
        at[order] = np.arange(len(wanted))
        where[~np.asarray(places.is_null(), dtype=bool)] = at
        return rows.take(pa.array(where, mask=where < 0))

    def _join(self) -> None:
        while len(self._pieces) > 1 and self._pieces[-2].num_rows <= 2 * self._pieces[-1].num_rows:
            last = self._pieces.pop()
            self._starts.pop()
            self._pieces[-1] = pa.concat_tables([self._pieces[-1], last]).combine_chunks()
