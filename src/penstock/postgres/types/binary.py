r"""bytea in the hex format, `\x48656c6c6f`, which the session settings of both roads pin.

The digits of all values are turned into bytes at once; Arrow has no kernel for it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.column import DecodedColumn, TextType, fixed, not_a_value

_EMPTY = pa.scalar(r"\x")
_NULL = pa.scalar(None, pa.binary())
_NOT_HEX = 0xFF
_NIBBLES = np.full(256, _NOT_HEX, np.uint8)
_NIBBLES[np.frombuffer(b"0123456789", np.uint8)] = np.arange(10)
_NIBBLES[np.frombuffer(b"abcdef", np.uint8)] = np.arange(10, 16)


def _decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    present = pc.fill_null(values, _EMPTY)
    _, offset_buffer, data_buffer = present.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[present.offset : present.offset + len(present) + 1].astype(np.int64)
    sizes = np.diff(offsets)
    if (sizes < 2).any() or (sizes & 1).any():
        raise not_a_value(arrow_type)
    text = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    starts = offsets[:-1] - offsets[0]
    if (text[starts] != ord("\\")).any() or (text[starts + 1] != ord("x")).any():
        raise not_a_value(arrow_type)
    digits = np.ones(len(text), np.bool_)
    digits[starts] = digits[starts + 1] = False
    nibbles = _NIBBLES[text[digits]]
    if (nibbles == _NOT_HEX).any():
        raise not_a_value(arrow_type)
    decoded_offsets = np.zeros(len(present) + 1, np.int32)
    np.cumsum(sizes // 2 - 1, out=decoded_offsets[1:])
    buffers = [None, pa.py_buffer(decoded_offsets), pa.py_buffer(nibbles[0::2] << 4 | nibbles[1::2])]
    decoded = pa.Array.from_buffers(arrow_type, len(present), buffers)
    if values.null_count:
        decoded = pc.if_else(values.is_valid(), decoded, _NULL)
    return DecodedColumn(decoded)


TYPES = {17: TextType(fixed(pa.binary()), _decode)}
