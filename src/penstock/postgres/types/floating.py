"""float4 and float8. NaN and the infinities are values like others; Postgres writes the shortest text that reads back exactly."""

from __future__ import annotations

import pyarrow as pa

from penstock.postgres.types.column import TextType, cast_all, fixed

TYPES = {
    "float4": TextType(fixed(pa.float32()), cast_all),
    "float8": TextType(fixed(pa.float64()), cast_all),
}
