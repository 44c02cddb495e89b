"""Comparing as Spark compares: NaN equals itself and is above every number, texts go by their bytes, numbers by their value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

_COMPARE: Final[Mapping[str, Callable[[pa.Array, pa.Array], pa.Array]]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_MOST_DIGITS = 76


def is_comparable(left: pa.DataType, right: pa.DataType) -> bool:
    """Whether Spark compares the two as they are, or as numbers; not decimals with floats, which it rounds in a way of its own."""
    mixed = (pa.types.is_decimal(left) and pa.types.is_floating(right)) or (pa.types.is_floating(left) and pa.types.is_decimal(right))
    return not mixed and _family(left) is not None and _family(left) == _family(right)


def _family(kind: pa.DataType) -> str | None:
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_timestamp(kind):
        return "instant" if kind.tz else "timestamp"
    tests = {"text": pa.types.is_string, "boolean": pa.types.is_boolean, "date": pa.types.is_date}
    return next((name for name, holds in tests.items() if holds(kind)), None)


def compare(sign: str, left: pa.Array, right: pa.Array) -> pa.Array:
    """`sign` is one of SQL's, or `<=>`, which is never null."""
    if sign == "<=>":
        equal = compare("=", left, right)
        return pc.if_else(pc.and_(left.is_valid(), right.is_valid()), equal, pc.and_(left.is_null(), right.is_null()))
    left, right = _alike(left, right)
    if pa.types.is_floating(left.type):
        # Where either is NaN, it is their ranks that count: numbers come before it.
        left_rank, right_rank = pc.is_nan(left).cast(pa.int8()), pc.is_nan(right).cast(pa.int8())
        odd = pc.or_(pc.is_nan(left), pc.is_nan(right))
        return pc.if_else(odd, _COMPARE[sign](left_rank, right_rank), _COMPARE[sign](left, right))
    return _COMPARE[sign](left, right)


def _alike(left: pa.Array, right: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Two columns of numbers in one type that holds both."""
    kinds = (left.type, right.type)
    if kinds[0] == kinds[1]:
        return left, right
    if any(map(pa.types.is_floating, kinds)):
        return left.cast(pa.float64(), safe=False), right.cast(pa.float64(), safe=False)
    if any(map(pa.types.is_decimal, kinds)):
        scale = max(kind.scale if pa.types.is_decimal(kind) else 0 for kind in kinds)
        wide = pa.decimal256(_MOST_DIGITS, scale)
        return _as_decimal(left, wide), _as_decimal(right, wide)
    if all(map(pa.types.is_integer, kinds)):
        return left.cast(pa.int64()), right.cast(pa.int64())
    return left, right.cast(left.type)


def _as_decimal(values: pa.Array, wide: pa.DataType) -> pa.Array:
    return (values.cast(pa.decimal256(20, 0)) if pa.types.is_integer(values.type) else values).cast(wide)


def like(values: pa.Array, pattern: str) -> pa.Array:
    """`%` is any text, lines too, and `_` any one character."""
    return pc.match_like(values, pattern)
