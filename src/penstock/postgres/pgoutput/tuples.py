"""Walks the tuples of thousands of messages at once, column by column, and lays Arrow strings over what it finds.

Tuples are sorted by column count, most first. So column c exists for a prefix of them, and one walk serves all tables of a call.

Every length is read unsigned and the walk stops at the first column that passes its message's end: no damage makes it loop, read
outside the buffer, or give a value from another message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.postgres.pgoutput.framing import ByteArray, Frames, IntArray
from penstock.postgres.types.arrays import bitmap

TEXT, NULL, UNCHANGED = b"tnu"

Spans = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnSpans:
    """Where a column's values lie: start and end for each tuple. `kinds` is None when all of them are text."""

    spans: Spans
    kinds: ByteArray | None

    def __getitem__(self, part: IntArray | slice) -> ColumnSpans:
        return ColumnSpans(self.spans[part], None if self.kinds is None else self.kinds[part])

    def kinds_or_text(self) -> ByteArray:
        return np.full(len(self.spans), TEXT, np.uint8) if self.kinds is None else self.kinds

    def strings(self, buffer: pa.Buffer, chosen: IntArray, hidden: npt.NDArray[np.bool_] | None = None) -> pa.StringArray:
        """The values of the tuples `chosen`, null where there is no text or where `hidden`."""
        present = hidden if hidden is None else ~hidden
        if self.kinds is not None:
            is_text = self.kinds[chosen] == TEXT
            present = is_text if present is None else is_text & present
        if not len(chosen):
            return pa.array([], pa.string())
        # Starts and ends side by side are the offsets of an array in which every second entry is a value.
        laid = pa.StringArray.from_buffers(2 * len(self.spans) - 1, pa.py_buffer(self.spans), buffer)
        mask = None if present is None or present.all() else bitmap(present)
        return laid.take(pa.Array.from_buffers(pa.int64(), len(chosen), [mask, pa.py_buffer(chosen * 2)]))


def join_spans(first: ColumnSpans, second: ColumnSpans) -> ColumnSpans:
    spans = np.concatenate([first.spans, second.spans])
    if first.kinds is None and second.kinds is None:
        return ColumnSpans(spans, None)
    return ColumnSpans(spans, np.concatenate([first.kinds_or_text(), second.kinds_or_text()]))


def walk(frames: Frames, messages: IntArray, at: IntArray, ends: IntArray, widths: IntArray) -> tuple[list[ColumnSpans], IntArray]:
    """Read tuples that begin at `at`, after their column count, and end at or before `ends`; `widths` says how many columns each has.

    Gives the columns, and where each tuple ends.
    """
    columns: list[ColumnSpans] = []
    cursor = at.copy()
    for column in range(int(widths[0]) if len(widths) else 0):
        # Widths descend: the tuples that have this column stand first.
        count = len(widths) if widths[-1] > column else int(np.searchsorted(-widths, -column))
        here = cursor[:count]
        kinds = frames.octets[here]
        is_text = kinds == TEXT
        spans = np.empty((count, 2), np.int32)
        if is_text.all():
            start = here + 5
            end = start + frames.u32(here + 1)
            columns.append(ColumnSpans(spans, None))
        else:
            frames.require(is_text | (kinds == NULL) | (kinds == UNCHANGED), messages[:count], "has a value of an unknown kind")
            start = here + np.where(is_text, 5, 1)
            end = start + np.where(is_text, frames.u32(here + 1), 0)
            columns.append(ColumnSpans(spans, kinds))
        frames.require(end <= ends[:count], messages[:count], "ends inside a value")
        spans[:, 0] = start
        spans[:, 1] = end
        cursor[:count] = end
    return columns, cursor
