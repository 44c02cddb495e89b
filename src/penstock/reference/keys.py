"""Keys of rows, as values that can be looked up: two are equal if SQL would find the rows equal, as far as the decoder can tell.

A value that its type cannot hold stands for itself by its exact text. Null is equal to nothing, so a key with a null is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa

KeyValue: TypeAlias = tuple[object, ...]

_NAN = "nan"
"""Postgres takes NaN for equal to itself; Python does not."""


def key_values(columns: Sequence[pa.Array], names: Sequence[str], exact: pa.Array | None = None) -> list[KeyValue | None]:
    """The key of each row. `names` are what the columns are called in `exact`, the rows' `_exact`, if they have one."""
    values = [_comparable(column) for column in columns]
    if exact is not None and exact.null_count < len(exact):
        _insert_exact(values, names, exact)
    return [None if None in key else key for key in zip(*values, strict=True)]


def family(arrow_type: pa.DataType) -> str | None:
    """Types of one family can be compared with each other; None if values of this type cannot be looked up at all."""
    kinds = {
        "number": pa.types.is_integer(arrow_type) or pa.types.is_decimal(arrow_type),
        "floating point": pa.types.is_floating(arrow_type),
        "text": pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type),
        "bytes": pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type),
        "boolean": pa.types.is_boolean(arrow_type),
        "date": pa.types.is_date32(arrow_type),
        "time of day": pa.types.is_time(arrow_type),
        "instant": pa.types.is_timestamp(arrow_type) and arrow_type.tz is not None,
        "timestamp": pa.types.is_timestamp(arrow_type) and arrow_type.tz is None,
    }
    return next((name for name, is_it in kinds.items() if is_it), None)


def _comparable(column: pa.Array) -> list[Any]:
    """As Python values. Times as numbers: Python's own do not go as far as those of Postgres."""
    if pa.types.is_timestamp(column.type):
        return list(column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64()).to_pylist())
    if pa.types.is_date32(column.type):
        return list(column.cast(pa.int32()).to_pylist())
    if pa.types.is_time(column.type):
        return list(column.cast(pa.time64("us")).cast(pa.int64()).to_pylist())
    values = column.to_pylist()
    if pa.types.is_floating(column.type):
        return [_NAN if value is not None and math.isnan(value) else value for value in values]
    return list(values)


def _insert_exact(values: list[list[Any]], names: Sequence[str], exact: pa.Array) -> None:
    for row, entries in enumerate(exact.to_pylist()):
        for name, text in entries or ():
            for place, known in enumerate(names):
                if known == name:
                    values[place][row] = text
