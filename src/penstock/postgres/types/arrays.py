"""Arrow arrays laid over numpy memory, without pyarrow's own conversion, which would import pandas where that is installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bools = npt.NDArray[np.bool_]


def as_arrow(values: npt.NDArray[Any], arrow_type: pa.DataType) -> pa.Array:
    """Numbers of the same width as `arrow_type`, none of them null."""
    return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def bitmap(present: Bools) -> pa.Buffer:
    """A mask as Arrow keeps it: of validity, or of booleans."""
    return pa.py_buffer(np.packbits(present, bitorder="little"))


def as_bools(values: pa.BooleanArray) -> Bools:
    """A mask without nulls, as numpy sees it."""
    bits = np.frombuffer(values.buffers()[1], np.uint8)
    return np.unpackbits(bits, count=values.offset + len(values), bitorder="little")[values.offset :].view(np.bool_)


def distinct(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the values in ascending order, each once; the same array if it is so already.

    `np.unique` hashes since numpy 2.3, which takes a second per million values. Row numbers nearly always ascend, which takes half a
    millisecond to check.
    """
    if bool(np.all(values[1:] > values[:-1])):
        return values
    ordered = np.sort(values)
    return np.compress(np.concatenate([[True], ordered[1:] != ordered[:-1]]), ordered)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Where the entries of `_exact` and `_unchanged` go: lists with at most one entry for each table column, null in nearly every row."""

    order: npt.NDArray[np.int64]
    """Puts entries, concatenated in column order, into row order."""
    columns: npt.NDArray[np.int64]
    """The table column of each entry, in row order."""
    row_count: int
    offsets: npt.NDArray[np.int32]

    @classmethod
    def plan(cls, row_count: int, rows_by_column: dict[int, npt.NDArray[np.int64]]) -> Ragged:
        rows = np.concatenate(list(rows_by_column.values()))
        columns = np.repeat(np.fromiter(rows_by_column, np.int64), [len(rows) for rows in rows_by_column.values()])
        order = np.argsort(rows, kind="stable")
        offsets = np.zeros(row_count + 1, np.int32)
        np.cumsum(np.bincount(rows, minlength=row_count), out=offsets[1:])
        return cls(order, columns[order], row_count, offsets)

    @property
    def filled_rows(self) -> int:
        return int(np.count_nonzero(np.diff(self.offsets)))

    def build(self, arrow_type: pa.DataType, entries: pa.Array) -> pa.Array:
        """Make the column; `entries` are its children, in row order."""
        buffers = [bitmap(np.diff(self.offsets) > 0), pa.py_buffer(self.offsets)]
        return pa.Array.from_buffers(arrow_type, self.row_count, buffers, children=[entries])
