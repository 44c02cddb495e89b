"""Codes and hashes of keys. Equal keys have equal codes within a task, and equal hashes in every file,
process and run.

Keys are compared as in Postgres: NaN equals NaN, and minus zero equals zero. Null equals null. If a column's
type cannot hold a value, the column is null, and the value's text in `_exact` is part of the key.

A hash depends on its own row only, unlike a code. So a file can be hashed piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import as_arrow, as_bools
from penstock.change import EXACT

Codes = npt.NDArray[np.int64]

_JOINT_LIMIT = 1 << 62
_SPREAD = 4
_NULL_BITS = 0x7FF8_0000_0000_0001
"""The bits of a NaN that no computation returns. They represent null among the bits of floats."""


def key_codes(tables: Sequence[pa.Table], names: Sequence[str]) -> list[Codes]:
    """Return, for each table, the codes of the keys of its rows. Codes are comparable across the tables. The
    greatest code is at most a few times the number of rows.

    `names` are the key columns. `_exact` is optional. A column whose type differs between the tables is cast
    to its type in the first table.
    """
    codes = np.zeros(sum(table.num_rows for table in tables), np.int64)
    for name in names:
        codes = _joint(codes, _codes(_column(tables, name)))
        texts = _texts(tables, name)
        if texts is not None:
            codes = _joint(codes, _codes(texts))
    ends = np.cumsum([table.num_rows for table in tables])
    return np.split(codes, ends[:-1])


def exact_texts(exact: pa.ChunkedArray, name: str) -> pa.ChunkedArray | None:
    """The texts in `_exact` for the column `name`; None if no row has one."""
    if exact.null_count == len(exact):
        return None
    found = pc.map_lookup(exact, pa.scalar(name, pa.string()), "first")
    return None if found.null_count == len(found) else found


def _column(tables: Sequence[pa.Table], name: str) -> pa.ChunkedArray:
    columns = [table.column(name) for table in tables]
    first = columns[0].type
    same = [column if column.type.equals(first) else column.cast(first) for column in columns]
    return pa.chunked_array([chunk for column in same for chunk in column.chunks], first)


def _texts(tables: Sequence[pa.Table], name: str) -> pa.ChunkedArray | None:
    columns = [
        exact_texts(table.column(EXACT), name) if EXACT in table.column_names else None for table in tables
    ]
    if all(column is None for column in columns):
        return None
    chunks: list[pa.Array] = []
    for table, column in zip(tables, columns, strict=True):
        chunks += [pa.nulls(table.num_rows, pa.string())] if column is None else column.chunks
    return pa.chunked_array(chunks, pa.string())


def _joint(codes: Codes, others: Codes) -> Codes:
    """Return one code for each pair of a code in `codes` and a code in `others`."""
    if not len(codes) or not codes.any():
        return others
    width = int(others.max()) + 1
    if width == 1:
        return codes
    if (int(codes.max()) + 1) * width > _JOINT_LIMIT:
        raise OverflowError("more keys than 64 bits can number")
    return _encoded(pa.chunked_array([as_arrow(codes * width + others, pa.int64())]))


def _codes(column: pa.ChunkedArray) -> Codes:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _codes(column.cast(kind.value_type))
    if pa.types.is_null(kind):
        return np.zeros(len(column), np.int64)
    if pa.types.is_integer(kind):
        return _int_codes(column)
    if pa.types.is_floating(kind):
        return _encoded(_float_bits(column))
    if pa.types.is_struct(kind):
        return _struct_codes(column)
    if pa.types.is_nested(kind):
        return _list_codes(column)
    return _encoded(column)


def _int_codes(column: pa.ChunkedArray) -> Codes:
    """Codes of integers. If the values are close together, such as those of a sequence, subtracting the
    smallest one is enough.
    """
    if len(column) and not column.null_count and not pa.types.is_uint64(column.type):
        parts = [_ints(chunk, chunk.type.to_pandas_dtype()) for chunk in column.chunks]
        values = np.concatenate(parts).astype(np.int64)
        low, high = int(values.min()), int(values.max())
        if high - low < _SPREAD * len(values):
            return values - low
    return _encoded(column)


def _encoded(column: pa.ChunkedArray) -> Codes:
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    parts = [_ints(chunk.indices, np.int32) for chunk in encoded.chunks]
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def _ints(array: pa.Array, kind: npt.DTypeLike) -> npt.NDArray[np.int64]:
    """The values of an array without nulls, read from its buffer."""
    values = np.frombuffer(array.buffers()[1], kind) if len(array) else np.empty(0, kind)
    return values[array.offset : array.offset + len(array)]


def _float_bits(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The bits of floats, made equal for equal values: one zero, one NaN."""
    chunks = []
    for chunk in column.cast(pa.float64()).chunks:
        known = pc.fill_null(chunk, 0.0)
        values = (
            np.frombuffer(known.buffers()[1], np.float64)[known.offset : known.offset + len(known)]
            if len(known)
            else np.empty(0)
        )
        bits = np.where(np.isnan(values), np.nan, values + 0.0).view(np.int64)
        chunks.append(
            pc.if_else(chunk.is_valid(), as_arrow(bits, pa.int64()), pa.scalar(_NULL_BITS, pa.int64()))
        )
    return pa.chunked_array(chunks, pa.int64())


def _struct_codes(column: pa.ChunkedArray) -> Codes:
    codes = _encoded(column.is_valid())
    for child in column.flatten():
        codes = _joint(codes, _codes(child))
    return codes


def _list_codes(column: pa.ChunkedArray) -> Codes:
    """A list is identified by the codes of its elements, as one byte string."""
    if pa.types.is_map(column.type):
        entries = pa.struct([pa.field("key", column.type.key_type), pa.field("value", column.type.item_type)])
        column = column.cast(pa.list_(pa.field("entries", entries)))
    elements = _codes(pc.list_flatten(column))
    lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64()).combine_chunks()
    offsets = np.concatenate([[0], np.cumsum(_ints(lengths, np.int64))]) * elements.itemsize
    strings = pa.Array.from_buffers(
        pa.large_binary(),
        len(column),
        [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(np.ascontiguousarray(elements))],
    )
    return _joint(_encoded(column.is_valid()), _encoded(pa.chunked_array([strings])))


Hashes = npt.NDArray[np.uint64]

_FACTOR = 0x9E37_79B9_7F4A_7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_NULL = np.uint64(0x5851_F42D_4C95_7F2D)
_LONGEST = 1024
"""Of a longer text, only this number of bytes at the start is hashed."""
_BLOCK = 1 << 17
"""Number of elements that are hashed at once, as eight-byte words."""


def key_hashes(rows: pa.Table, names: Sequence[str]) -> Hashes:
    """The hash of each row's columns `names`, and of their texts in `_exact`."""
    hashes = np.zeros(rows.num_rows, np.uint64)
    for name in names:
        hashes = _joint_key_hashes(hashes, _of_chunks(rows.column(name)))
        texts = exact_texts(rows.column(EXACT), name) if EXACT in rows.column_names else None
        if texts is not None:
            known = np.concatenate([as_bools(chunk.is_valid()) for chunk in texts.chunks])
            hashes = np.where(known, _joint_key_hashes(hashes, _of_chunks(texts)), hashes)
    return hashes


def _of_chunks(column: pa.ChunkedArray) -> Hashes:
    return np.concatenate([np.empty(0, np.uint64), *(_of_array(chunk) for chunk in column.chunks)])


def _of_array(array: pa.Array) -> Hashes:
    if not len(array):
        return np.empty(0, np.uint64)
    hashes = _of_values(array)
    return np.where(as_bools(array.is_valid()), hashes, _NULL) if array.null_count else hashes


def _of_values(array: pa.Array) -> Hashes:
    """Hashes of the values of an array. The hashes of nulls are arbitrary."""
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
    """Hash values of one width, a power of two."""
    if width < 8:
        return _mixed(_fixed(array, f"<u{width}").astype(np.uint64))
    words = _fixed(array, np.dtype((np.uint64, width // 8)))
    hashes = np.zeros(len(array), np.uint64)
    for at in range(width // 8):
        hashes = _joint_key_hashes(hashes, _mixed(words[:, at]))
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
        array = array.cast(
            pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)]))
        )
    array = array.cast(pa.large_list(array.type.value_type))
    offsets = _fixed_offsets(array)
    return _ragged(_of_array(array.values), offsets)


def _of_struct(array: pa.Array) -> Hashes:
    hashes = np.zeros(len(array), np.uint64)
    for child in array.flatten():
        hashes = _joint_key_hashes(hashes, _of_array(child))
    return hashes


def _ragged(elements: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> Hashes:
    """Hash each run of elements by a polynomial of its elements, modulo 2^64. The polynomials are computed
    for all runs at once, as differences of running sums.
    """
    hashes = np.empty(len(offsets) - 1, np.uint64)
    first = 0
    while first < len(hashes):
        # A run that is longer than a block is a block by itself.
        last = max(int(np.searchsorted(offsets, offsets[first] + _BLOCK, "right")) - 1, first + 1)
        low, high = int(offsets[first]), int(offsets[last])
        powers, inverses = _powers(high - low)
        sums = np.zeros(high - low + 1, np.uint64)
        np.cumsum((elements[low:high].astype(np.uint64) + np.uint64(1)) * powers[: high - low], out=sums[1:])
        ends = offsets[first : last + 1] - low
        lengths = (ends[1:] - ends[:-1]).astype(np.uint64)
        hashes[first:last] = _joint_key_hashes(
            _mixed(lengths), (sums[ends[1:]] - sums[ends[:-1]]) * inverses[ends[:-1]]
        )
        first = last
    return hashes


def _powers(count: int) -> tuple[Hashes, Hashes]:
    """At least `count` + 1 powers of the factor, and as many of its inverse."""
    return _powers_upto(1 << max(count, 15).bit_length())


@lru_cache(maxsize=4)
def _powers_upto(count: int) -> tuple[Hashes, Hashes]:
    def powers(factor: int) -> Hashes:
        found = np.full(count, factor, np.uint64)
        found[0] = 1
        return np.multiply.accumulate(found)

    return powers(_FACTOR), powers(_INVERSE)


def _joint_key_hashes(hashes: Hashes, others: Hashes) -> Hashes:
    return _mixed(hashes * np.uint64(_FACTOR) + others)


def _mixed(words: Hashes) -> Hashes:
    """Mix every bit of a word into every bit of the hash."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return words ^ (words >> np.uint64(31))


def _fixed(array: pa.Array, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """The values of a fixed-width array, read from its buffer."""
    values = np.frombuffer(array.buffers()[1], kind)
    return values[array.offset : array.offset + len(array)]


def _fixed_offsets(array: pa.Array) -> npt.NDArray[np.int64]:
    found = np.frombuffer(array.buffers()[1], np.int64)
    return found[array.offset : array.offset + len(array) + 1]
