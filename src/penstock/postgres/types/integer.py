"""int2, int4, int8, and oid, which is unsigned and so becomes a long."""

from __future__ import annotations

import pyarrow as pa

from penstock.postgres.types.column import TextType, cast_all, fixed

TYPES = {
    "int2": TextType(fixed(pa.int16()), cast_all),
    "int4": TextType(fixed(pa.int32()), cast_all),
    "int8": TextType(fixed(pa.int64()), cast_all),
    "oid": TextType(fixed(pa.int64()), cast_all),
}
