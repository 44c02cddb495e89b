"""PostGIS geometry and geography: hex EWKB, as the SRID (0: none is set) and the WKB without it.

In two dimensions that is the WKB of the standard; Z and M stay the flags that EWKB has for them, which readers of WKB know.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.postgres.types.binary import decode_hex
from penstock.postgres.types.column import WRITTEN_OTHERWISE, DecodedColumn, TextType, fixed, not_a_value, tolerant
from penstock.postgres.types.quoting import Ints, Octets, Texts, strings_between
from penstock.schema import GEOMETRY_TYPE

_EMPTY = pa.scalar("0101000000")
_HEADER, _SRID = 5, 4
_HAS_SRID = 0x20
_LITTLE = 1


def _decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    texts = Texts.of(values, _EMPTY)
    sizes = texts.ends - texts.starts
    if (sizes < 2 * _HEADER).any() or (sizes & 1).any():
        raise not_a_value(arrow_type)
    octets = decode_hex(texts.octets, arrow_type)
    starts, ends = texts.starts // 2, texts.ends // 2
    order = octets[starts]
    if (order > _LITTLE).any():
        raise not_a_value(arrow_type)
    # The highest byte of the type: the last one if the order is little-endian, else the first.
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
    shapes = strings_between(octets, starts, ends, dropped=dropped if has_srid.any() else None, arrow_type=pa.binary())
    numbers = pa.Array.from_buffers(pa.int32(), len(srids), [None, pa.py_buffer(srids)])
    mask = values.is_null() if values.null_count else None
    return DecodedColumn(pa.StructArray.from_arrays([numbers, shapes], fields=list(arrow_type), mask=mask))


def _numbers(octets: Octets, places: Ints, is_little: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Ints:
    parts = [octets[places + at].astype(np.int64) for at in range(_SRID)]
    little = sum(part << 8 * at for at, part in enumerate(parts))
    big = sum(part << 8 * at for at, part in enumerate(reversed(parts)))
    return np.where(is_little, little, big)


TYPES = {name: TextType(fixed(GEOMETRY_TYPE), tolerant(_decode), WRITTEN_OTHERWISE) for name in ("geometry", "geography")}
