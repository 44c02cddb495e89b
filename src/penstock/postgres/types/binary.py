r"""bytea in the hex format, `\x48656c6c6f`, which the session settings of both roads pin.

The digits of all values are turned into bytes at once; Arrow has no kernel for it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.postgres.types.arrays import as_bools, bitmap
from penstock.postgres.types.column import DecodedColumn, TextType, fixed, not_a_value
from penstock.postgres.types.quoting import Octets, Texts

_EMPTY = pa.scalar(r"\x")
_NOT_HEX = 0xFF
_NIBBLES = np.full(256, _NOT_HEX, np.uint8)
_NIBBLES[np.frombuffer(b"0123456789", np.uint8)] = np.arange(10)
_NIBBLES[np.frombuffer(b"abcdef", np.uint8)] = np.arange(10, 16)
_NIBBLES[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)


def decode_hex(digits: Octets, arrow_type: pa.DataType) -> Octets:
    """Bytes from their digits, an even number of them."""
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
    return DecodedColumn(pa.Array.from_buffers(arrow_type, len(values), [validity, pa.py_buffer(offsets), pa.py_buffer(decoded)]))


TYPES = {"bytea": TextType(fixed(pa.binary()), _decode)}
