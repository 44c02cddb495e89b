"""Decode types that Postgres writes as hexadecimal text: bytea, and geometry and geography of PostGIS, which
become an SRID and a WKB value. numpy converts the digits of all values at once, since Arrow has no kernel for
it. Two-dimensional geometries become standard WKB. Geometries with Z or M coordinates keep the flags of EWKB,
which WKB readers accept.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.arrow import as_bools, bitmap
from penstock.postgres.types.column import (
    WRITTEN_OTHERWISE,
    DecodedColumn,
    TextType,
    fixed,
    not_a_value,
    tolerant,
)
from penstock.postgres.types.quoting import Ints, Octets, Texts, strings_between
from penstock.schema import GEOMETRY_TYPE

_EMPTY = pa.scalar(r"\x")
_NOT_HEX = 0xFF
_NIBBLES = np.full(256, _NOT_HEX, np.uint8)
_NIBBLES[np.frombuffer(b"0123456789", np.uint8)] = np.arange(10)
_NIBBLES[np.frombuffer(b"abcdef", np.uint8)] = np.arange(10, 16)
_NIBBLES[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)


def decode_hex(digits: Octets, arrow_type: pa.DataType) -> Octets:
    """Convert hexadecimal digits, whose number must be even, to bytes."""
    nibbles = _NIBBLES[digits]
    if (nibbles == _NOT_HEX).any():
        raise not_a_value(arrow_type)
    return (nibbles[0::2] << 4 | nibbles[1::2]).astype(np.uint8, copy=False)


def _decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    texts = Texts.of(values, _EMPTY)
    sizes = texts.ends - texts.starts
    if (sizes < 2).any() or (sizes & 1).any():
        raise not_a_value(arrow_type)
    if (texts.octets[texts.starts] != ord("\\")).any() or (texts.octets[texts.starts + 1] != ord("x")).any():
        raise not_a_value(arrow_type)
    is_digit = np.ones(len(texts.octets), np.bool_)
    is_digit[texts.starts] = is_digit[texts.starts + 1] = False
    decoded = decode_hex(texts.octets[is_digit], arrow_type)
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(sizes // 2 - 1, out=offsets[1:])
    validity = bitmap(as_bools(values.is_valid())) if values.null_count else None
    return DecodedColumn(
        pa.Array.from_buffers(
            arrow_type, len(values), [validity, pa.py_buffer(offsets), pa.py_buffer(decoded)]
        )
    )


BINARY_TYPES = {"bytea": TextType(fixed(pa.binary()), _decode)}


_GEOMETRY_EMPTY = pa.scalar("0101000000")
_HEADER, _SRID = 5, 4
_HAS_SRID = 0x20
_LITTLE = 1


def _decode_geometry(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    texts = Texts.of(values, _GEOMETRY_EMPTY)
    sizes = texts.ends - texts.starts
    if (sizes < 2 * _HEADER).any() or (sizes & 1).any():
        raise not_a_value(arrow_type)
    octets = decode_hex(texts.octets, arrow_type)
    starts, ends = texts.starts // 2, texts.ends // 2
    order = octets[starts]
    if (order > _LITTLE).any():
        raise not_a_value(arrow_type)
    # Each geometry type has four bytes. Its highest byte is the last one in little-endian order, otherwise
    # the first.
    flags = starts + np.where(order == _LITTLE, 4, 1)
    has_srid = octets[flags] & _HAS_SRID > 0
    if (ends - starts < _HEADER + _SRID * has_srid).any():
        raise not_a_value(arrow_type)
    srids = np.zeros(len(values), np.int32)
    srids[has_srid] = _numbers(octets, starts[has_srid] + _HEADER, order[has_srid] == _LITTLE)
    octets[flags] &= 0xFF ^ _HAS_SRID
    dropped = np.zeros(len(octets), np.bool_)
    for at in range(_SRID):
        dropped[starts[has_srid] + _HEADER + at] = True
    shapes = strings_between(
        octets, starts, ends, dropped=dropped if has_srid.any() else None, arrow_type=pa.binary()
    )
    numbers = pa.Array.from_buffers(pa.int32(), len(srids), [None, pa.py_buffer(srids)])
    mask = values.is_null() if values.null_count else None
    return DecodedColumn(pa.StructArray.from_arrays([numbers, shapes], fields=list(arrow_type), mask=mask))


def _numbers(octets: Octets, places: Ints, is_little: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Ints:
    parts = [octets[places + at].astype(np.int64) for at in range(_SRID)]
    little = sum(part << 8 * at for at, part in enumerate(parts))
    big = sum(part << 8 * at for at, part in enumerate(reversed(parts)))
    return np.where(is_little, little, big)


GEOMETRY_TYPES = {
    name: TextType(fixed(GEOMETRY_TYPE), tolerant(_decode_geometry), WRITTEN_OTHERWISE)
    for name in ("geometry", "geography")
}
