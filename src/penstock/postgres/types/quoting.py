r"""Texts with structure, such as `{1,"a b",NULL}` and `"a"=>"b"`, cut into pieces for a whole column at once.

The bytes of all values lie in one numpy array. Quotes and what a backslash escapes are found by masks over it, and the pieces between two
sets of places become one Arrow array; no Python object is made for any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.arrays import Bools, bitmap

Ints = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]

_STRING = pa.string()
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """All values one after the other. `starts` and `ends` say where each one lies."""

    octets: Octets
    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, values: pa.StringArray, filler: pa.StringScalar) -> Texts:
        """Lay them out; `filler` stands for null, and is not empty if none of the values is."""
        present = pc.fill_null(values, filler) if values.null_count else values
        _, offset_buffer, data_buffer = present.buffers()
        offsets = np.frombuffer(offset_buffer, np.int32)[present.offset : present.offset + len(present) + 1].astype(np.int64)
        data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
        return cls(data[offsets[0] : offsets[-1]], offsets[:-1] - offsets[0], offsets[1:] - offsets[0])

    def has(self, octet: int) -> bool:
        return bool((self.octets == octet).any())

    def count(self, marks: Bools) -> Ints:
        """How many marked bytes each value has."""
        sums = np.zeros(len(marks) + 1, np.int64)
        np.cumsum(marks, out=sums[1:])
        return sums[self.ends] - sums[self.starts]


@dataclass(frozen=True, slots=True, eq=False)
class Quoting:
    """Of each byte: whether it is a quote that opens or closes, whether it only escapes the next one, whether it lies outside of quotes."""

    quotes: Bools
    escapes: Bools
    outside: Bools

    @classmethod
    def find(cls, texts: Texts) -> Quoting | None:
        """None if nothing is quoted at all."""
        if not texts.has(_QUOTE):
            return None
        octets = texts.octets
        quotes = octets == _QUOTE
        escapes = np.zeros(len(octets), np.bool_)
        backslashes = octets == _BACKSLASH
        if backslashes.any():
            escaped = _after_odd_run(backslashes)
            quotes &= ~escaped
            escapes = backslashes & ~escaped
        outside = ~np.bitwise_xor.accumulate(quotes)
        return cls(quotes, escapes, outside)


def _after_odd_run(marks: Bools) -> Bools:
    """Which bytes follow a run of marked ones of odd length."""
    places = np.arange(len(marks))
    last_unmarked = np.maximum.accumulate(np.where(marks, -1, places))
    odd = ((places - last_unmarked) & 1).astype(np.bool_)
    after = np.zeros(len(marks), np.bool_)
    after[1:] = odd[:-1]
    return after


def strings_between(
    octets: Octets, begins: Ints, ends: Ints, *, dropped: Bools | None = None, nulls: Bools | None = None, arrow_type: pa.DataType = _STRING
) -> pa.Array:
    """The pieces from `begins` up to `ends`, which follow one another without overlap, but for the `dropped` bytes in them."""
    if nulls is not None:
        ends = np.where(nulls, begins, ends)
    steps = np.zeros(len(octets) + 1, np.int8)
    filled = begins < ends
    steps[begins[filled]] += 1
    steps[ends[filled]] -= 1
    kept = np.add.accumulate(steps, dtype=np.int8)[:-1].view(np.bool_)
    sizes = ends - begins
    if dropped is not None:
        kept &= ~dropped
        sums = np.zeros(len(octets) + 1, np.int64)
        np.cumsum(kept, out=sums[1:])
        sizes = sums[ends] - sums[begins]
    offsets = np.zeros(len(begins) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    buffers = [bitmap(~nulls) if nulls is not None else None, pa.py_buffer(offsets), pa.py_buffer(octets[kept])]
    return pa.Array.from_buffers(arrow_type, len(begins), buffers)


def ragged(arrow_type: pa.DataType, sizes: npt.NDArray[Any], present: Bools | None, children: pa.Array) -> pa.Array:
    """A list or map column from the number of entries in each row."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    validity = bitmap(present) if present is not None else None
    return pa.Array.from_buffers(arrow_type, len(sizes), [validity, pa.py_buffer(offsets)], children=[children])
