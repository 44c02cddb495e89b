"""One column of a built-in type, by its OID, without a table."""

from __future__ import annotations

import pyarrow as pa

from penstock.postgres.types.column import DecodedColumn
from penstock.postgres.types.registry import TypeResolver, decode_column


def arrow_type(type_oid: int, type_modifier: int = -1) -> pa.DataType:
    return TypeResolver().column("", type_oid, type_modifier).arrow_type


def decode_text(values: pa.StringArray, type_oid: int, type_modifier: int = -1) -> DecodedColumn:
    return decode_column(values, TypeResolver().column("", type_oid, type_modifier))
