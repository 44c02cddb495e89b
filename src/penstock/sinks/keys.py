"""Numbers for keys, so that rows can be grouped and met with numpy: equal keys have equal numbers, whatever their types.

Keys are equal as the source has it: NaN is NaN, minus zero is zero, null is null; and where a value is beyond its column's type, so that
the column is null and `_exact` has the text, that text is part of the key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import EXACT
from penstock.postgres.types.arrays import as_arrow

Codes = npt.NDArray[np.int64]

_JOINT_LIMIT = 1 << 62
_SPREAD = 4
_NULL_BITS = 0x7FF8_0000_0000_0001
"""A NaN that no computation gives: stands for null among the bits of floats."""


def key_codes(tables: Sequence[pa.Table], names: Sequence[str]) -> list[Codes]:
    """For each table the numbers of its rows' keys, comparable across the tables: from 0 to a few times as many as there are rows.

    `names` are the columns of the key. Tables may have `_exact` or not; types that differ are read as the first table's.
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
    """What `_exact` says of the column `name`; None if nothing in any row."""
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
    columns = [exact_texts(table.column(EXACT), name) if EXACT in table.column_names else None for table in tables]
    if all(column is None for column in columns):
        return None
    chunks: list[pa.Array] = []
    for table, column in zip(tables, columns, strict=True):
        chunks += [pa.nulls(table.num_rows, pa.string())] if column is None else column.chunks
    return pa.chunked_array(chunks, pa.string())


def _joint(codes: Codes, others: Codes) -> Codes:
    """Numbers for pairs of numbers."""
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
    """Numbers that lie close together, as those of a sequence do, only need to begin at 0."""
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
    """The buffer of an array without nulls."""
    values = np.frombuffer(array.buffers()[1], kind) if len(array) else np.empty(0, kind)
    return values[array.offset : array.offset + len(array)]


def _float_bits(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Equal bits for equal values."""
    chunks = []
    for chunk in column.cast(pa.float64()).chunks:
        known = pc.fill_null(chunk, 0.0)
        values = np.frombuffer(known.buffers()[1], np.float64)[known.offset : known.offset + len(known)] if len(known) else np.empty(0)
        bits = np.where(np.isnan(values), np.nan, values + 0.0).view(np.int64)
        chunks.append(pc.if_else(chunk.is_valid(), as_arrow(bits, pa.int64()), pa.scalar(_NULL_BITS, pa.int64())))
    return pa.chunked_array(chunks, pa.int64())


def _struct_codes(column: pa.ChunkedArray) -> Codes:
    codes = _encoded(column.is_valid())
    for child in column.flatten():
        codes = _joint(codes, _codes(child))
    return codes


def _list_codes(column: pa.ChunkedArray) -> Codes:
    """A list is known by the numbers of its elements, one after the other, taken for a string of bytes."""
    if pa.types.is_map(column.type):
        entries = pa.struct([pa.field("key", column.type.key_type), pa.field("value", column.type.item_type)])
        column = column.cast(pa.list_(pa.field("entries", entries)))
    elements = _codes(pc.list_flatten(column))
    lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64()).combine_chunks()
    offsets = np.concatenate([[0], np.cumsum(_ints(lengths, np.int64))]) * elements.itemsize
    strings = pa.Array.from_buffers(
        pa.large_binary(), len(column), [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(np.ascontiguousarray(elements))]
    )
    return _joint(_encoded(column.is_valid()), _encoded(pa.chunked_array([strings])))
