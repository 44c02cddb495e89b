r"""Whole rows as Postgres writes them, `(1,"a ""b"" \\ c",,"")`, cut into a column of text for each field, for many rows at once.

Nothing between two commas is NULL. A text that is empty, or holds a comma, a parenthesis, a quote, a backslash or white space stands in
quotes; there a quote and a backslash are written twice. So every field has an even number of quotes, and a byte lies outside of quotes if
an even number of them stands before it, however many rows come before.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.errors import ProtocolError
from penstock.postgres.types.arrays import Bools, as_arrow
from penstock.postgres.types.quoting import Ints, Octets, Texts, strings_between

_OPEN, _CLOSE, _COMMA, _QUOTE, _BACKSLASH = (ord(each) for each in '(),"\\')
_NOT_A_ROW = "a text that Postgres does not write for a row"


def split_records(records: pa.StringArray, fields: int) -> list[pa.StringArray]:
    """One array for each field, null where the field is. All `records` are there, and have just so many fields."""
    if not fields or not len(records):
        return [pa.array([], pa.string()) for _ in range(fields)]
    texts = Texts.of(records, pa.scalar("()"))
    octets = texts.octets
    _check(np.all(texts.ends - texts.starts >= 2))
    _check(np.all(octets[texts.starts] == _OPEN) and np.all(octets[texts.ends - 1] == _CLOSE))
    commas = octets == _COMMA
    dropped: Bools | None = None
    quotes = octets == _QUOTE
    if quotes.any():
        commas &= ~np.bitwise_xor.accumulate(quotes)
    _check(np.all(texts.count(commas) == fields - 1))
    begins, ends = _bounds(texts, np.flatnonzero(commas), fields)
    if quotes.any():
        dropped = _dropped(octets, quotes, begins)
    pieces = strings_between(octets, begins, ends, dropped=dropped, nulls=begins == ends)
    return [pieces.take(as_arrow(np.arange(at, len(pieces), fields), pa.int64())) for at in range(fields)]


def _bounds(texts: Texts, commas: Ints, fields: int) -> tuple[Ints, Ints]:
    """Where each field begins and ends, row by row: between the parentheses, and at the commas in between."""
    inner = commas.reshape(len(texts.starts), fields - 1)
    begins = np.concatenate([texts.starts[:, np.newaxis] + 1, inner + 1], axis=1)
    ends = np.concatenate([inner, texts.ends[:, np.newaxis] - 1], axis=1)
    return begins.ravel(), ends.ravel()


def _dropped(octets: Octets, quotes: Bools, begins: Ints) -> Bools:
    """Bytes that are not part of the values: quotes around them, and the first of each two quotes or backslashes inside."""
    # Counted from 0 in all rows together: the one that opens a field is even, and of each two inside the second is.
    is_even = np.bitwise_xor.accumulate(quotes)
    opens = np.zeros(len(octets), np.bool_)
    opens[begins] = True
    dropped: Bools = quotes & (opens | ~is_even)
    backslashes = octets == _BACKSLASH
    if backslashes.any():
        dropped |= _first_of_two(backslashes)
    return dropped


def _first_of_two(marks: Bools) -> Bools:
    """Of runs of marked bytes, all of even length: every other one, from the first on."""
    places = np.arange(len(marks))
    last_unmarked = np.maximum.accumulate(np.where(marks, -1, places))
    result: Bools = marks & (((places - last_unmarked) & 1) == 1)
    return result


def _check(is_right: bool | np.bool_) -> None:
    if not is_right:
        raise ProtocolError(_NOT_A_ROW)
