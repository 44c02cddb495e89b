"""Split structured text such as `{1,"a b",NULL}`, `"a"=>"b"` and `(1,"a ""b\"\"\",,)` into its parts, for a
whole column at once.

The bytes of all values are in one numpy array. Quotes and escaped bytes are found with masks over it, and the
pieces between two arrays of offsets become one Arrow array, without creating Python objects.

In composite values, an empty field (nothing between two commas) is NULL. A text is quoted if it is empty or
contains a comma, parenthesis, quote, backslash or white space; quotes and backslashes in it are doubled. So
every field has an even number of quotes. A byte is outside of quotes if an even number of quotes precedes it,
counted over all rows together.
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
        """Concatenate the values. `filler` replaces nulls; it must not be empty if the format has no empty
        values.
        """
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
        """Return the number of marked bytes in each value."""
        sums = np.zeros(len(marks) + 1, np.int64)
        np.cumsum(marks, out=sums[1:])
        return sums[self.ends] - sums[self.starts]


@dataclass(frozen=True, slots=True, eq=False)
class Quoting:
    """Three masks over the bytes of all values: opening and closing quotes, bytes that only escape the next
    byte, and bytes outside of quotes.
    """

    quotes: Bools
    escapes: Bools
    outside: Bools

    @classmethod
    def find(cls, texts: Texts) -> Quoting | None:
        """Find the quotes; None if there are none."""
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
    """Return a mask of the bytes that follow a run with an odd number of marked bytes."""
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
    """Return an array of the pieces between `begins` and `ends`, without the `dropped` bytes in them. The
    pieces must be in order and must not overlap. Pieces in the mask `nulls` become null.
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
    """Build a list or map column. `sizes` has the number of entries of each row, `children` the entries of
    all rows.
    """
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    validity = bitmap(present) if present is not None else None
    return pa.Array.from_buffers(
        arrow_type, len(sizes), [validity, pa.py_buffer(offsets)], children=[children]
    )


_OPEN, _CLOSE, _COMMA, _RECORDS_QUOTE, _RECORDS_BACKSLASH = (ord(each) for each in '(),"\\')
_NOT_A_ROW = "a text that Postgres does not write for a row"


def split_records(records: pa.StringArray, fields: int) -> list[pa.StringArray]:
    """Split the texts of composite values into one array for each field. A field that is NULL becomes null.
    No record may be null, and all must have this number of fields.
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
    """Return the start and end of each field, row by row: the text between the parentheses, split at the
    commas.
    """
    inner = commas.reshape(len(texts.starts), fields - 1)
    begins = np.concatenate([texts.starts[:, np.newaxis] + 1, inner + 1], axis=1)
    ends = np.concatenate([inner, texts.ends[:, np.newaxis] - 1], axis=1)
    return begins.ravel(), ends.ravel()


def _dropped(octets: Octets, quotes: Bools, begins: Ints) -> Bools:
    """Return a mask of the bytes that are not part of the values: enclosing quotes, and the first of each
    doubled quote or backslash.
    """
    # The quotes of all rows together are numbered from 0. Opening quotes and the second of each doubled quote
    # then have even numbers, and all others odd numbers.
    is_even = np.bitwise_xor.accumulate(quotes)
    opens = np.zeros(len(octets), np.bool_)
    opens[begins] = True
    dropped: Bools = quotes & (opens | ~is_even)
    backslashes = octets == _RECORDS_BACKSLASH
    if backslashes.any():
        dropped |= _first_of_two(backslashes)
    return dropped


def _first_of_two(marks: Bools) -> Bools:
    """Return a mask of the first, third, fifth … byte of each run of marked bytes. All runs must have an even
    length.
    """
    places = np.arange(len(marks))
    last_unmarked = np.maximum.accumulate(np.where(marks, -1, places))
    result: Bools = marks & (((places - last_unmarked) & 1) == 1)
    return result


def _check(is_right: bool | np.bool_) -> None:
    if not is_right:
        raise ProtocolError(_NOT_A_ROW)
