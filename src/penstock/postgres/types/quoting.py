"""Split structured text such as `{1,"a b",NULL}`, `"a"=>"b"` and `(1,"a ""b\"\"\",,)` into its parts, for a
whole column at once.

The bytes of all values are in one numpy array. Quotes and escaped bytes are found with masks over it, and the
pieces between two arrays of offsets become one Arrow array, without creating Python objects.

In composite values, nothing between two commas is NULL, and a text that is empty or contains a comma,
parenthesis, quote, backslash or white space is quoted, with quotes and backslashes doubled. So every field
has an even number of quotes, and a byte is outside of quotes if an even number of them precede it, in all
rows together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Bools, as_arrow, bitmap
from penstock.errors import ProtocolError

Ints = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]

_STRING = pa.string()
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """All values concatenated, with the start and end offset of each."""

    octets: Octets
    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, values: pa.StringArray, filler: pa.StringScalar) -> Texts:
        """Concatenate the values; `filler` replaces nulls, and must not be empty if no value is."""
        present = pc.fill_null(values, filler) if values.null_count else values
        _, offset_buffer, data_buffer = present.buffers()
        offsets = np.frombuffer(offset_buffer, np.int32)[
            present.offset : present.offset + len(present) + 1
        ].astype(np.int64)
        data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
        return cls(data[offsets[0] : offsets[-1]], offsets[:-1] - offsets[0], offsets[1:] - offsets[0])

    def has(self, octet: int) -> bool:
        return bool((self.octets == octet).any())

    def count(self, marks: Bools) -> Ints:
        """The number of marked bytes in each value."""
        sums = np.zeros(len(marks) + 1, np.int64)
        np.cumsum(marks, out=sums[1:])
        return sums[self.ends] - sums[self.starts]


@dataclass(frozen=True, slots=True, eq=False)
class Quoting:
    """For each byte: whether it is an opening or closing quote, whether it only escapes the next byte,
    whether it is outside of quotes.
    """

    quotes: Bools
    escapes: Bools
    outside: Bools

    @classmethod
    def find(cls, texts: Texts) -> Quoting | None:
        """None if nothing is quoted."""
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
    """The bytes that follow an odd number of marked bytes."""
    places = np.arange(len(marks))
    last_unmarked = np.maximum.accumulate(np.where(marks, -1, places))
    odd = ((places - last_unmarked) & 1).astype(np.bool_)
    after = np.zeros(len(marks), np.bool_)
    after[1:] = odd[:-1]
    return after


def strings_between(
    octets: Octets,
    begins: Ints,
    ends: Ints,
    *,
    dropped: Bools | None = None,
    nulls: Bools | None = None,
    arrow_type: pa.DataType = _STRING,
) -> pa.Array:
    """The pieces from `begins` to `ends`, in order and without overlap, without the `dropped` bytes in
    them.
    """
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
    buffers = [
        bitmap(~nulls) if nulls is not None else None,
        pa.py_buffer(offsets),
        pa.py_buffer(octets[kept]),
    ]
    return pa.Array.from_buffers(arrow_type, len(begins), buffers)


def ragged(
    arrow_type: pa.DataType, sizes: npt.NDArray[Any], present: Bools | None, children: pa.Array
) -> pa.Array:
    """A list or map column from the number of entries in each row."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    validity = bitmap(present) if present is not None else None
    return pa.Array.from_buffers(
        arrow_type, len(sizes), [validity, pa.py_buffer(offsets)], children=[children]
    )


_OPEN, _CLOSE, _COMMA, _RECORDS_QUOTE, _RECORDS_BACKSLASH = (ord(each) for each in '(),"\\')
_NOT_A_ROW = "a text that Postgres does not write for a row"


def split_records(records: pa.StringArray, fields: int) -> list[pa.StringArray]:
    """One array for each field, null where the field is. No record may be null, and all must have this number
    of fields.
    """
    if not fields or not len(records):
        return [pa.array([], pa.string()) for _ in range(fields)]
    texts = Texts.of(records, pa.scalar("()"))
    octets = texts.octets
    _check(np.all(texts.ends - texts.starts >= 2))
    _check(np.all(octets[texts.starts] == _OPEN) and np.all(octets[texts.ends - 1] == _CLOSE))
    commas = octets == _COMMA
    dropped: Bools | None = None
    quotes = octets == _RECORDS_QUOTE
    if quotes.any():
        commas &= ~np.bitwise_xor.accumulate(quotes)
    _check(np.all(texts.count(commas) == fields - 1))
    begins, ends = _bounds(texts, np.flatnonzero(commas), fields)
    if quotes.any():
        dropped = _dropped(octets, quotes, begins)
    pieces = strings_between(octets, begins, ends, dropped=dropped, nulls=begins == ends)
    return [pieces.take(as_arrow(np.arange(at, len(pieces), fields), pa.int64())) for at in range(fields)]


def _bounds(texts: Texts, commas: Ints, fields: int) -> tuple[Ints, Ints]:
    """Start and end of each field, row by row: between the parentheses, split at the commas."""
    inner = commas.reshape(len(texts.starts), fields - 1)
    begins = np.concatenate([texts.starts[:, np.newaxis] + 1, inner + 1], axis=1)
    ends = np.concatenate([inner, texts.ends[:, np.newaxis] - 1], axis=1)
    return begins.ravel(), ends.ravel()


def _dropped(octets: Octets, quotes: Bools, begins: Ints) -> Bools:
    """Bytes that are not part of the values: enclosing quotes, and the first of each doubled quote or
    backslash.
    """
    # Counted from 0 in all rows together: an opening quote has an even number, and so has the second of each
    # doubled one.
    is_even = np.bitwise_xor.accumulate(quotes)
    opens = np.zeros(len(octets), np.bool_)
    opens[begins] = True
    dropped: Bools = quotes & (opens | ~is_even)
    backslashes = octets == _RECORDS_BACKSLASH
    if backslashes.any():
        dropped |= _first_of_two(backslashes)
    return dropped


def _first_of_two(marks: Bools) -> Bools:
    """Every second byte, from the first, of runs of marked bytes of even length."""
    places = np.arange(len(marks))
    last_unmarked = np.maximum.accumulate(np.where(marks, -1, places))
    result: Bools = marks & (((places - last_unmarked) & 1) == 1)
    return result


def _check(is_right: bool | np.bool_) -> None:
    if not is_right:
        raise ProtocolError(_NOT_A_ROW)
