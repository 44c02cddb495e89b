"""Decode container types: Postgres arrays and the vector types of pgvector as lists, hstore as a map from
text to text.

A Postgres column may contain arrays with any number of dimensions and any bounds, whatever its declaration.
An Arrow column has one type, which a stream must choose before it has read all rows. So arrays become lists,
which represent the usual case: one dimension whose first index is 1. All other arrays are inexact, and so are
arrays with an inexact element. An empty array becomes an empty list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Bools, as_bools, bitmap
from penstock.postgres.types.column import (
    NULL_TEXT,
    WRITTEN_OTHERWISE,
    DecodedColumn,
    TextType,
    cast,
    fixed,
    not_a_value,
    tolerant,
)
from penstock.postgres.types.quoting import Ints, Quoting, Texts, ragged, strings_between
from penstock.postgres.types.scalars import check_encoding

_EMPTY = pa.scalar("{}")
_NULL = np.frombuffer(b"NULL", np.uint8)
_BEYOND = "more than one dimension, a lower bound other than 1"


def list_of(element: TextType, delimiter: str = ",") -> TextType:
    """Return the decoder of arrays whose elements are decoded by `element`."""

    def decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
        return _decode(values, arrow_type, element, ord(delimiter))

    beyond = f"{_BEYOND}; an element that is {element.beyond}" if element.beyond else _BEYOND
    return TextType(lambda modifier, policy: pa.list_(element.arrow_type(modifier, policy)), decode, beyond)


def _decode(
    values: pa.StringArray, arrow_type: pa.DataType, element: TextType, delimiter: int
) -> DecodedColumn:
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


def _decode_rest(
    values: pa.StringArray, left_out: Bools, arrow_type: pa.DataType, element: TextType, delimiter: int
) -> DecodedColumn:
    """Decode all values except those in `left_out`, which become inexact. They are excluded before decoding,
    since Parquet cannot write a null that has elements.
    """
    inexact = pa.Array.from_buffers(pa.bool_(), len(left_out), [None, bitmap(left_out)])
    rest = _decode(pc.if_else(inexact, NULL_TEXT, values), arrow_type, element, delimiter)
    return DecodedColumn(rest.values, inexact if rest.inexact is None else pc.or_(inexact, rest.inexact))


def _find_odd(texts: Texts, quoting: Quoting | None, arrow_type: pa.DataType) -> Bools:
    """Return a mask of the arrays that have more than one dimension, or whose first index is not 1. Raises an
    error if a text is not an array.
    """
    if (texts.ends - texts.starts < 2).any():
        raise not_a_value(arrow_type)
    opens, closes, escapes = (texts.octets == ord(mark) for mark in "{}\\")
    if quoting is not None:
        opens &= quoting.outside
        closes &= quoting.outside
        escapes &= quoting.outside
    # Postgres quotes every text that needs escapes.
    if escapes.any():
        raise not_a_value(arrow_type)
    has_bounds = texts.octets[texts.starts] == ord("[")
    depth = texts.count(opens)
    is_plain = opens[texts.starts] & (depth == 1)
    is_odd: Bools = has_bounds | (opens[texts.starts] & opens[texts.starts + 1])
    if (
        not (is_plain | is_odd).all()
        or not closes[texts.ends - 1].all()
        or not (texts.count(closes) == depth).all()
    ):
        raise not_a_value(arrow_type)
    return is_odd


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Where the elements of a column's values are in its buffer: the start and end of each element, excluding
    brackets and delimiters, and the number of elements of each value.
    """

    begins: Ints
    ends: Ints
    sizes: Ints


def split(texts: Texts, quoting: Quoting | None, delimiter: int) -> Pieces:
    """Split values into their elements. Each value must be enclosed in one pair of brackets."""
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
    return strings_between(
        texts.octets, pieces.begins, pieces.ends, dropped=dropped, nulls=nulls if nulls.any() else None
    )


DENSE_TYPE = pa.list_(pa.float32())
SPARSE_TYPE = pa.struct(
    [("dimensions", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))]
)

_EMPTY_DENSE, _EMPTY_SPARSE = pa.scalar("[]"), pa.scalar("{}/0")
_SPARSE = r"^(?P<entries>\{.*\})/(?P<dimensions>[0-9]+)$"
_ENTRY = r"^(?P<index>[0-9]+):(?P<value>[^:]+)$"


def _elements_vector(
    texts: Texts, brackets: bytes, arrow_type: pa.DataType
) -> tuple[pa.StringArray, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    is_framed = texts.ends - texts.starts >= len(brackets)
    if not is_framed.all():
        raise not_a_value(arrow_type)
    opens, closes = texts.octets == brackets[0], texts.octets == brackets[1]
    if not (
        opens[texts.starts] & closes[texts.ends - 1] & (texts.count(opens | closes) == len(brackets))
    ).all():
        raise not_a_value(arrow_type)
    pieces = split(texts, None, ord(","))
    return strings_between(texts.octets, pieces.begins, pieces.ends), pieces.sizes


def _present(values: pa.StringArray) -> Bools | None:
    return as_bools(values.is_valid()) if values.null_count else None


def _decode_dense(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    elements, sizes = _elements_vector(Texts.of(values, _EMPTY_DENSE), b"[]", arrow_type)
    return DecodedColumn(ragged(arrow_type, sizes, _present(values), cast(elements, arrow_type.value_type)))


def _decode_sparse(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    parts = pc.extract_regex(pc.fill_null(values, _EMPTY_SPARSE), _SPARSE)
    if parts.null_count:
        raise not_a_value(arrow_type)
    texts, sizes = _elements_vector(Texts.of(parts.field("entries"), _EMPTY_SPARSE), b"{}", arrow_type)
    entries = pc.extract_regex(texts, _ENTRY)
    if entries.null_count:
        raise not_a_value(arrow_type)
    fields = {name: arrow_type.field(name).type for name in ("dimensions", "indices", "values")}
    indices = ragged(
        fields["indices"], sizes, None, cast(entries.field("index"), fields["indices"].value_type)
    )
    weights = ragged(fields["values"], sizes, None, cast(entries.field("value"), fields["values"].value_type))
    dimensions = cast(parts.field("dimensions"), fields["dimensions"])
    mask = values.is_null() if values.null_count else None
    return DecodedColumn(
        pa.StructArray.from_arrays([dimensions, indices, weights], fields=list(arrow_type), mask=mask)
    )


VECTOR_TYPES = {
    "vector": TextType(fixed(DENSE_TYPE), tolerant(_decode_dense), WRITTEN_OTHERWISE),
    "halfvec": TextType(fixed(DENSE_TYPE), tolerant(_decode_dense), WRITTEN_OTHERWISE),
    "sparsevec": TextType(fixed(SPARSE_TYPE), tolerant(_decode_sparse), WRITTEN_OTHERWISE),
}


_HSTORE_EMPTY = pa.scalar("")


def _decode_hstore(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    check_encoding(values)
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    texts = Texts.of(values, _HSTORE_EMPTY)
    present = as_bools(values.is_valid()) if values.null_count else None
    quoting = Quoting.find(texts)
    if quoting is None:
        if len(texts.octets):
            raise not_a_value(arrow_type)
        children = pa.StructArray.from_arrays(
            [pa.array([], pa.string())] * 2, fields=[arrow_type.key_field, arrow_type.item_field]
        )
        return DecodedColumn(ragged(arrow_type, np.zeros(len(values), np.int64), present, children))
    tokens = _Tokens.find(texts, quoting)
    if tokens is None:
        raise not_a_value(arrow_type)
    children = pa.StructArray.from_arrays(
        tokens.strings(texts, quoting), fields=[arrow_type.key_field, arrow_type.item_field]
    )
    sizes = np.bincount(tokens.rows[tokens.is_key], minlength=len(values))
    return DecodedColumn(ragged(arrow_type, sizes, present, children))


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """The quoted tokens of all values. For each token: the offsets of its two quotes, the index of its value
    (`rows`), whether it is a key, and whether it is a key whose item is NULL.
    """

    opens: Ints
    closes: Ints
    rows: Ints
    is_key: Bools
    is_null_key: Bools

    @classmethod
    def find(cls, texts: Texts, quoting: Quoting) -> _Tokens | None:
        """Find the tokens. Returns None if the values are not in hstore format."""
        places = np.flatnonzero(quoting.quotes)
        if len(places) % 2:
            return None
        opens, closes = places[0::2], places[1::2]
        rows = np.searchsorted(texts.ends, opens, side="right")
        is_key = _matches_at(texts, closes + 1, rows, b"=>")
        tokens = cls(opens, closes, rows, is_key, is_key & _matches_at(texts, closes + 1, rows, b"=>NULL"))
        return tokens if tokens.are_well_formed(texts) else None

    def are_well_formed(self, texts: Texts) -> bool:
        """Whether in each value keys and items alternate, with only `=>` and `, ` between them, and with
        nothing before the first key and after the last item.
        """
        is_first = np.diff(self.rows, prepend=-1) > 0
        is_last = np.append(is_first[1:], True)
        is_open_key = self.is_key & ~self.is_null_key
        after = self.closes + np.where(self.is_null_key, 7, np.where(self.is_key, 3, 1))
        comes_next = np.append(self.opens[1:], -1)
        has_comma = _matches_at(texts, after, self.rows, b", ")
        is_alone = np.ones(len(texts.starts), np.bool_)
        is_alone[self.rows] = False
        checks = (
            ~is_first | ((self.opens == texts.starts[self.rows]) & self.is_key),
            ~is_last | (~is_open_key & (after == texts.ends[self.rows])),
            is_last | np.where(is_open_key, comes_next == after, has_comma & (comes_next == after + 2)),
            self.is_key != np.append(False, is_open_key[:-1]),
            (texts.ends == texts.starts)[is_alone],
        )
        return all(bool(check.all()) for check in checks)

    def strings(self, texts: Texts, quoting: Quoting) -> list[pa.StringArray]:
        """Return two arrays: the keys and the items of all values."""
        is_key = self.is_key
        keys = strings_between(
            texts.octets, self.opens[is_key] + 1, self.closes[is_key], dropped=quoting.escapes
        )
        # An item that is NULL has no token. An empty piece right after its key represents it.
        begins, ends = self.closes[is_key] + 1, self.closes[is_key] + 1
        nulls = self.is_null_key[is_key]
        begins[~nulls], ends[~nulls] = self.opens[~is_key] + 1, self.closes[~is_key]
        items = strings_between(
            texts.octets, begins, ends, dropped=quoting.escapes, nulls=nulls if nulls.any() else None
        )
        return [keys, items]


def _matches_at(texts: Texts, places: Ints, rows: Ints, expected: bytes) -> Bools:
    """Return for each offset in `places` whether the bytes there equal `expected` and are inside the value
    that `rows` names.
    """
    found = places + len(expected) <= texts.ends[rows]
    for at, octet in enumerate(expected):
        found[found] = texts.octets[places[found] + at] == octet
    return found


HSTORE_TYPES = {
    "hstore": TextType(fixed(pa.map_(pa.string(), pa.string())), tolerant(_decode_hstore), WRITTEN_OTHERWISE)
}
