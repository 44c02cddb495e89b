"""Postgres arrays: `{1,2,NULL}` and `{"a b",c}` as lists of the element's own type.

A column is declared as an array of any number of dimensions and any bounds, and each value may have its own. A typed column has one type,
and a stream cannot look at all rows before it chooses one: so a list is what arrays nearly always are, one-dimensional from 1. Others are
inexact, as are those with an element that is. The empty array is the empty list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.arrays import Bools, as_bools, bitmap
from penstock.postgres.types.column import NULL_TEXT, DecodedColumn, TextType, not_a_value
from penstock.postgres.types.quoting import Ints, Quoting, Texts, ragged, strings_between

_EMPTY = pa.scalar("{}")
_NULL = np.frombuffer(b"NULL", np.uint8)
_BEYOND = "more than one dimension, a lower bound other than 1"


def list_of(element: TextType, delimiter: str = ",") -> TextType:
    """How arrays of `element` are read."""

    def decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
        return _decode(values, arrow_type, element, ord(delimiter))

    beyond = f"{_BEYOND}; an element that is {element.beyond}" if element.beyond else _BEYOND
    return TextType(lambda modifier, policy: pa.list_(element.arrow_type(modifier, policy)), decode, beyond)


def _decode(values: pa.StringArray, arrow_type: pa.DataType, element: TextType, delimiter: int) -> DecodedColumn:
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    texts = Texts.of(values, _EMPTY)
    quoting = Quoting.find(texts)
    is_odd = _find_odd(texts, quoting, arrow_type)
    if is_odd.any():
        return _decode_rest(values, is_odd, arrow_type, element, delimiter)
    pieces = split(texts, quoting, delimiter)
    decoded = element.decode(_elements(texts, quoting, pieces), arrow_type.value_type)
    if decoded.inexact is not None and decoded.inexact.true_count:
        rows = np.repeat(np.arange(len(values)), pieces.sizes)
        has_inexact = np.zeros(len(values), np.bool_)
        has_inexact[rows[as_bools(decoded.inexact)]] = True
        return _decode_rest(values, has_inexact, arrow_type, element, delimiter)
    present = as_bools(values.is_valid()) if values.null_count else None
    return DecodedColumn(ragged(arrow_type, pieces.sizes, present, decoded.values))


def _decode_rest(values: pa.StringArray, left_out: Bools, arrow_type: pa.DataType, element: TextType, delimiter: int) -> DecodedColumn:
    """All but some values; Parquet cannot take a null with elements beneath it, so they are not there from the start."""
    inexact = pa.Array.from_buffers(pa.bool_(), len(left_out), [None, bitmap(left_out)])
    rest = _decode(pc.if_else(inexact, NULL_TEXT, values), arrow_type, element, delimiter)
    return DecodedColumn(rest.values, inexact if rest.inexact is None else pc.or_(inexact, rest.inexact))


def _find_odd(texts: Texts, quoting: Quoting | None, arrow_type: pa.DataType) -> Bools:
    """Values that are arrays, but not one-dimensional from 1."""
    if (texts.ends - texts.starts < 2).any():
        raise not_a_value(arrow_type)
    opens, closes, escapes = (texts.octets == ord(mark) for mark in "{}\\")
    if quoting is not None:
        opens &= quoting.outside
        closes &= quoting.outside
        escapes &= quoting.outside
    # Postgres quotes whatever it has to escape.
    if escapes.any():
        raise not_a_value(arrow_type)
    has_bounds = texts.octets[texts.starts] == ord("[")
    depth = texts.count(opens)
    is_plain = opens[texts.starts] & (depth == 1)
    is_odd: Bools = has_bounds | (opens[texts.starts] & opens[texts.starts + 1])
    if not (is_plain | is_odd).all() or not closes[texts.ends - 1].all() or not (texts.count(closes) == depth).all():
        raise not_a_value(arrow_type)
    return is_odd


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Elements: where each begins and ends, brackets and delimiters left out, and how many each value has."""

    begins: Ints
    ends: Ints
    sizes: Ints


def split(texts: Texts, quoting: Quoting | None, delimiter: int) -> Pieces:
    """Cut values that stand between one pair of brackets each."""
    delimiters = texts.octets == delimiter
    if quoting is not None:
        delimiters &= quoting.outside
    filled = texts.ends - texts.starts > 2
    sizes = np.where(filled, texts.count(delimiters) + 1, 0)
    begins, ends = delimiters.copy(), delimiters
    begins[texts.starts[filled]] = True
    ends[texts.ends[filled] - 1] = True
    return Pieces(np.flatnonzero(begins) + 1, np.flatnonzero(ends), sizes)


def _elements(texts: Texts, quoting: Quoting | None, pieces: Pieces) -> pa.StringArray:
    nulls = pieces.ends - pieces.begins == len(_NULL)
    for at, octet in enumerate(_NULL):
        nulls[nulls] = texts.octets[pieces.begins[nulls] + at] == octet
    dropped = quoting.quotes | quoting.escapes if quoting is not None else None
    return strings_between(texts.octets, pieces.begins, pieces.ends, dropped=dropped, nulls=nulls if nulls.any() else None)
