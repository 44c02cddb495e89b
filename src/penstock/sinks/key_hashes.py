"""Hashes of keys, by which an epoch's changes are shared out: the same for equal keys, in whatever file, process or run.

Keys are equal as `keys.py` has it. Unlike the numbers given out there, a hash needs no other row: a file can be read a piece at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import EXACT
from penstock.postgres.types.arrays import as_bools
from penstock.sinks.keys import exact_texts

Hashes = npt.NDArray[np.uint64]

_FACTOR = 0x9E37_79B9_7F4A_7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_NULL = np.uint64(0x5851_F42D_4C95_7F2D)
_LONGEST = 1024
"""Of longer texts only so many bytes count."""
_BLOCK = 1 << 17
"""Elements that are looked at in one go, and so held as words of eight bytes."""


def key_hashes(rows: pa.Table, names: Sequence[str]) -> Hashes:
    """For each row that of its columns `names`, and of what `_exact` says of them."""
    hashes = np.zeros(rows.num_rows, np.uint64)
    for name in names:
        hashes = _joint(hashes, _of_chunks(rows.column(name)))
        texts = exact_texts(rows.column(EXACT), name) if EXACT in rows.column_names else None
        if texts is not None:
            known = np.concatenate([as_bools(chunk.is_valid()) for chunk in texts.chunks])
            hashes = np.where(known, _joint(hashes, _of_chunks(texts)), hashes)
    return hashes


def _of_chunks(column: pa.ChunkedArray) -> Hashes:
    return np.concatenate([np.empty(0, np.uint64), *(_of_array(chunk) for chunk in column.chunks)])


def _of_array(array: pa.Array) -> Hashes:
    if not len(array):
        return np.empty(0, np.uint64)
    hashes = _of_values(array)
    return np.where(as_bools(array.is_valid()), hashes, _NULL) if array.null_count else hashes


def _of_values(array: pa.Array) -> Hashes:
    """What stands for a null may be anything."""
    kind = array.type
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.uint64)
    if pa.types.is_dictionary(kind):
        return _of_array(array.cast(kind.value_type))
    if pa.types.is_struct(kind):
        return _of_struct(array)
    if pa.types.is_nested(kind):
        return _of_lists(array)
    if pa.types.is_floating(kind):
        values = _fixed(pc.fill_null(array.cast(pa.float64()), 0.0), np.float64)
        return _mixed(np.where(np.isnan(values), np.nan, values + 0.0).view(np.uint64))
    if pa.types.is_boolean(kind):
        return _of_array(array.cast(pa.uint8()))
    if pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
        return _of_words(array, kind.bit_width // 8)
    return _of_texts(array)


def _of_words(array: pa.Array, width: int) -> Hashes:
    """Values of one width, which is a power of two."""
    if width < 8:
        return _mixed(_fixed(array, f"<u{width}").astype(np.uint64))
    words = _fixed(array, np.dtype((np.uint64, width // 8)))
    hashes = np.zeros(len(array), np.uint64)
    for at in range(width // 8):
        hashes = _joint(hashes, _mixed(words[:, at]))
    return hashes


def _of_texts(array: pa.Array) -> Hashes:
    array = array.cast(pa.large_binary())
    if (pc.max(pc.binary_length(array)).as_py() or 0) > _LONGEST:
        array = pc.binary_slice(array, 0, _LONGEST)
    offsets = _fixed_offsets(array)
    letters = np.frombuffer(array.buffers()[2] or b"", np.uint8)
    return _ragged(letters, offsets)


def _of_lists(array: pa.Array) -> Hashes:
    kind = array.type
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)])))
    array = array.cast(pa.large_list(array.type.value_type))
    offsets = _fixed_offsets(array)
    return _ragged(_of_array(array.values), offsets)


def _of_struct(array: pa.Array) -> Hashes:
    hashes = np.zeros(len(array), np.uint64)
    for child in array.flatten():
        hashes = _joint(hashes, _of_array(child))
    return hashes


def _ragged(elements: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> Hashes:
    """Of runs of elements, by a polynomial of each: differences of running sums, which all wrap around alike."""
    hashes = np.empty(len(offsets) - 1, np.uint64)
    first = 0
    while first < len(hashes):
        # A run that is longer than a block is one by itself.
        last = max(int(np.searchsorted(offsets, offsets[first] + _BLOCK, "right")) - 1, first + 1)
        low, high = int(offsets[first]), int(offsets[last])
        powers, inverses = _powers(high - low)
        sums = np.zeros(high - low + 1, np.uint64)
        np.cumsum((elements[low:high].astype(np.uint64) + np.uint64(1)) * powers[: high - low], out=sums[1:])
        ends = offsets[first : last + 1] - low
        lengths = (ends[1:] - ends[:-1]).astype(np.uint64)
        hashes[first:last] = _joint(_mixed(lengths), (sums[ends[1:]] - sums[ends[:-1]]) * inverses[ends[:-1]])
        first = last
    return hashes


def _powers(count: int) -> tuple[Hashes, Hashes]:
    """Of the factor and of its inverse, `count` and one more of each at least."""
    return _powers_upto(1 << max(count, 15).bit_length())


@lru_cache(maxsize=4)
def _powers_upto(count: int) -> tuple[Hashes, Hashes]:
    def powers(factor: int) -> Hashes:
        found = np.full(count, factor, np.uint64)
        found[0] = 1
        return np.multiply.accumulate(found)

    return powers(_FACTOR), powers(_INVERSE)


def _joint(hashes: Hashes, others: Hashes) -> Hashes:
    return _mixed(hashes * np.uint64(_FACTOR) + others)


def _mixed(words: Hashes) -> Hashes:
    """Every bit of a word in every bit of the hash."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return words ^ (words >> np.uint64(31))


def _fixed(array: pa.Array, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """The buffer of values of one width."""
    values = np.frombuffer(array.buffers()[1], kind)
    return values[array.offset : array.offset + len(array)]


def _fixed_offsets(array: pa.Array) -> npt.NDArray[np.int64]:
    found = np.frombuffer(array.buffers()[1], np.int64)
    return found[array.offset : array.offset + len(array) + 1]
