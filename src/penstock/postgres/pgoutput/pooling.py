"""Small batches of many tables, whose values are read together.

What a column costs beside its values is much the same for one row and for a thousand. So the columns of small batches are laid out one
after the other, those of one type side by side, read in one go for each type, and cut apart again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.errors import ProtocolError, UnreadableTextError
from penstock.postgres.pgoutput.framing import BoolArray, IntArray
from penstock.postgres.pgoutput.tuples import TEXT, ColumnSpans
from penstock.postgres.types.column import DecodedColumn
from penstock.postgres.types.registry import builtin_reader, decode_column
from penstock.schema import Column

SMALL_ROWS = 128
"""A batch with more rows is read by itself: it gains nothing, and its values need not be copied once more."""

_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A column of one batch: the tuples that its rows show, but for rows that are `hidden`."""

    column: Column
    spans: ColumnSpans
    chosen: IntArray
    hidden: BoolArray | None


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    texts: pa.StringArray
    decoded: DecodedColumn


def read_together(buffer: pa.Buffer, wanted: Sequence[Wanted]) -> list[Read] | None:
    """Each column's texts and values, in the order of `wanted`. None if they must be read one by one: to name what cannot be read, or
    because there is too much of them.
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
    """Which columns are read in the same way: their places, type by type."""
    places: dict[object, list[int]] = {}
    for at, each in enumerate(wanted):
        column = each.column
        places.setdefault((column.reader or builtin_reader(column.type_oid), column.arrow_type), []).append(at)
    return list(places.values())


def _lay_out(buffer: pa.Buffer, wanted: Sequence[Wanted]) -> pa.StringArray | None:
    """Their texts one after the other; None if there is too much of them."""
    counts = [len(each.spans.spans) for each in wanted]
    bases = np.cumsum(counts) - counts
    chosen = np.concatenate([each.chosen for each in wanted]) + np.repeat(bases, [len(each.chosen) for each in wanted])
    spans = np.concatenate([each.spans.spans for each in wanted])[chosen]
    if int((spans[:, 1] - spans[:, 0]).sum()) > _MAX_BYTES:
        return None
    # Arrow wants the offsets of an array in order.
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
