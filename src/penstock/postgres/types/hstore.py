"""hstore, `"a"=>"1", "b"=>NULL`, as a map from text to text. Postgres keeps a key once only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.postgres.types.arrays import Bools, as_bools
from penstock.postgres.types.column import WRITTEN_OTHERWISE, DecodedColumn, TextType, fixed, not_a_value, tolerant
from penstock.postgres.types.quoting import Ints, Quoting, Texts, ragged, strings_between
from penstock.postgres.types.text import check_encoding

_EMPTY = pa.scalar("")


def _decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    check_encoding(values)
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    texts = Texts.of(values, _EMPTY)
    present = as_bools(values.is_valid()) if values.null_count else None
    quoting = Quoting.find(texts)
    if quoting is None:
        if len(texts.octets):
            raise not_a_value(arrow_type)
        children = pa.StructArray.from_arrays([pa.array([], pa.string())] * 2, fields=[arrow_type.key_field, arrow_type.item_field])
        return DecodedColumn(ragged(arrow_type, np.zeros(len(values), np.int64), present, children))
    tokens = _Tokens.find(texts, quoting)
    if tokens is None:
        raise not_a_value(arrow_type)
    children = pa.StructArray.from_arrays(tokens.strings(texts, quoting), fields=[arrow_type.key_field, arrow_type.item_field])
    sizes = np.bincount(tokens.rows[tokens.is_key], minlength=len(values))
    return DecodedColumn(ragged(arrow_type, sizes, present, children))


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """Whatever stands in quotes: where, in which value, and whether it is a key, and one of a null."""

    opens: Ints
    closes: Ints
    rows: Ints
    is_key: Bools
    is_null_key: Bools

    @classmethod
    def find(cls, texts: Texts, quoting: Quoting) -> _Tokens | None:
        """None if the values are not written as hstore is."""
        places = np.flatnonzero(quoting.quotes)
        if len(places) % 2:
            return None
        opens, closes = places[0::2], places[1::2]
        rows = np.searchsorted(texts.ends, opens, side="right")
        is_key = _stands_at(texts, closes + 1, rows, b"=>")
        tokens = cls(opens, closes, rows, is_key, is_key & _stands_at(texts, closes + 1, rows, b"=>NULL"))
        return tokens if tokens.are_well_formed(texts) else None

    def are_well_formed(self, texts: Texts) -> bool:
        """Keys and values alternate, nothing stands between them but `=>` and `, `, and every value begins and ends with them."""
        is_first = np.diff(self.rows, prepend=-1) > 0
        is_last = np.append(is_first[1:], True)
        is_open_key = self.is_key & ~self.is_null_key
        after = self.closes + np.where(self.is_null_key, 7, np.where(self.is_key, 3, 1))
        comes_next = np.append(self.opens[1:], -1)
        has_comma = _stands_at(texts, after, self.rows, b", ")
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
        """The keys and the values."""
        is_key = self.is_key
        keys = strings_between(texts.octets, self.opens[is_key] + 1, self.closes[is_key], dropped=quoting.escapes)
        # A null has no token of its own: an empty piece right after the key stands for it.
        begins, ends = self.closes[is_key] + 1, self.closes[is_key] + 1
        nulls = self.is_null_key[is_key]
        begins[~nulls], ends[~nulls] = self.opens[~is_key] + 1, self.closes[~is_key]
        items = strings_between(texts.octets, begins, ends, dropped=quoting.escapes, nulls=nulls if nulls.any() else None)
        return [keys, items]


def _stands_at(texts: Texts, places: Ints, rows: Ints, expected: bytes) -> Bools:
    """Whether `expected` stands at the places, each within its value."""
    found = places + len(expected) <= texts.ends[rows]
    for at, octet in enumerate(expected):
        found[found] = texts.octets[places[found] + at] == octet
    return found


TYPES = {"hstore": TextType(fixed(pa.map_(pa.string(), pa.string())), tolerant(_decode), WRITTEN_OTHERWISE)}
