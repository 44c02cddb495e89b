"""Read the tuples of thousands of messages at once, column by column, as Arrow strings without copying. Small
batches of many tables are decoded together.

Tuples are sorted by column count in descending order, so column c exists for a prefix of them and one walk
serves all tables of a call. Every length is read as unsigned, and the walk stops at the first column that
passes its message's end: damaged input cannot make it loop, read outside the buffer, or return a value from
another message.

Decoding a column has a fixed cost that hardly depends on the number of rows. So the columns of small batches
are concatenated by type, decoded once per type, and split again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrow import bitmap
from penstock.errors import ProtocolError, UnreadableTextError
from penstock.postgres.pgoutput.messages import BoolArray, ByteArray, Frames, IntArray
from penstock.postgres.types.column import DecodedColumn
from penstock.postgres.types.registry import builtin_reader, decode_column
from penstock.schema import Column

TEXT, NULL, UNCHANGED = b"tnu"

Spans = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnSpans:
    """Start and end of a column's value in each tuple. `kinds` is None when all values are text."""

    spans: Spans
    kinds: ByteArray | None

    def __getitem__(self, part: IntArray | slice) -> ColumnSpans:
        return ColumnSpans(self.spans[part], None if self.kinds is None else self.kinds[part])

    def kinds_or_text(self) -> ByteArray:
        return np.full(len(self.spans), TEXT, np.uint8) if self.kinds is None else self.kinds

    def strings(
        self, buffer: pa.Buffer, chosen: IntArray, hidden: npt.NDArray[np.bool_] | None = None
    ) -> pa.StringArray:
        """The values of the tuples `chosen`; null where there is no text or where `hidden`."""
        present = hidden if hidden is None else ~hidden
        if self.kinds is not None:
            is_text = self.kinds[chosen] == TEXT
            present = is_text if present is None else is_text & present
        if not len(chosen):
            return pa.array([], pa.string())
        # Starts and ends interleaved are the offsets of an array in which every second entry is a value.
        laid = pa.StringArray.from_buffers(2 * len(self.spans) - 1, pa.py_buffer(self.spans), buffer)
        mask = None if present is None or present.all() else bitmap(present)
        return laid.take(pa.Array.from_buffers(pa.int64(), len(chosen), [mask, pa.py_buffer(chosen * 2)]))


def join_spans(first: ColumnSpans, second: ColumnSpans) -> ColumnSpans:
    spans = np.concatenate([first.spans, second.spans])
    if first.kinds is None and second.kinds is None:
        return ColumnSpans(spans, None)
    return ColumnSpans(spans, np.concatenate([first.kinds_or_text(), second.kinds_or_text()]))


def walk(
    frames: Frames, messages: IntArray, at: IntArray, ends: IntArray, widths: IntArray
) -> tuple[list[ColumnSpans], IntArray]:
    """Read tuples that begin at `at`, after their column count, and end at or before `ends`; `widths` holds
    the column count of each. Returns the columns, and the end of each tuple.
    """
    columns: list[ColumnSpans] = []
    cursor = at.copy()
    for column in range(int(widths[0]) if len(widths) else 0):
        # Widths descend: the tuples that have this column come first.
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
            frames.require(
                is_text | (kinds == NULL) | (kinds == UNCHANGED),
                messages[:count],
                "has a value of an unknown kind",
            )
            start = here + np.where(is_text, 5, 1)
            end = start + np.where(is_text, frames.u32(here + 1), 0)
            columns.append(ColumnSpans(spans, kinds))
        frames.require(end <= ends[:count], messages[:count], "ends inside a value")
        spans[:, 0] = start
        spans[:, 1] = end
        cursor[:count] = end
    return columns, cursor


SMALL_ROWS = 128
"""A batch with more rows is read separately: it would not gain from pooling, and its values would be copied
once more.
"""

_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A column of one batch: the tuples that its rows show, except for rows that are `hidden`."""

    column: Column
    spans: ColumnSpans
    chosen: IntArray
    hidden: BoolArray | None


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    texts: pa.StringArray
    decoded: DecodedColumn


def read_together(buffer: pa.Buffer, wanted: Sequence[Wanted]) -> list[Read] | None:
    """Each column's texts and values, in the order of `wanted`. None if they must be read one by one: to
    report unreadable values, or because of their size.
    """
    found: dict[int, Read] = {}
    for places in _by_type(wanted):
        together = [wanted[at] for at in places]
        texts = _lay_out(buffer, together)
        if texts is None:
            return None
        try:
            decoded = decode_column(texts, together[0].column)
        except (ProtocolError, UnreadableTextError):
            return None
        found.update(zip(places, _cut(texts, decoded, [len(each.chosen) for each in together]), strict=True))
    return [found[at] for at in range(len(wanted))]


def _by_type(wanted: Sequence[Wanted]) -> list[list[int]]:
    """The indices of columns that are decoded in the same way, type by type."""
    places: dict[object, list[int]] = {}
    for at, each in enumerate(wanted):
        column = each.column
        places.setdefault((column.reader or builtin_reader(column.type_oid), column.arrow_type), []).append(
            at
        )
    return list(places.values())


def _lay_out(buffer: pa.Buffer, wanted: Sequence[Wanted]) -> pa.StringArray | None:
    """Concatenate their texts; None if the result would be too large."""
    counts = [len(each.spans.spans) for each in wanted]
    bases = np.cumsum(counts) - counts
    chosen = np.concatenate([each.chosen for each in wanted]) + np.repeat(
        bases, [len(each.chosen) for each in wanted]
    )
    spans = np.concatenate([each.spans.spans for each in wanted])[chosen]
    if int((spans[:, 1] - spans[:, 0]).sum()) > _MAX_BYTES:
        return None
    # Arrow requires ascending offsets.
    order = np.argsort(spans[:, 0], kind="stable")
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return ColumnSpans(spans[order], None).strings(buffer, places, _absent(wanted))


def _absent(wanted: Sequence[Wanted]) -> BoolArray | None:
    """Which of their rows show no text."""
    if all(each.hidden is None and each.spans.kinds is None for each in wanted):
        return None
    return np.concatenate([_absent_rows(each) for each in wanted])


def _absent_rows(wanted: Wanted) -> BoolArray:
    kinds = wanted.spans.kinds
    absent = np.zeros(len(wanted.chosen), np.bool_) if kinds is None else kinds[wanted.chosen] != TEXT
    return absent if wanted.hidden is None else absent | wanted.hidden


def _cut(texts: pa.StringArray, decoded: DecodedColumn, sizes: list[int]) -> Iterator[Read]:
    low = 0
    for size in sizes:
        inexact = None if decoded.inexact is None else decoded.inexact.slice(low, size)
        yield Read(texts.slice(low, size), DecodedColumn(decoded.values.slice(low, size), inexact))
        low += size
