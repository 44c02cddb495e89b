"""Which changes of a column's type change no value, so that what was copied before them is as good as what comes after.

`ALTER … TYPE … USING` may put any value in the place of any other, and no log shows it. A change for which the server does not have to
rewrite the rows cannot have done that. A change to a wider number always rewrites them; it counts as harmless, being hardly ever anything
else.
"""

from __future__ import annotations

from enum import Enum, auto

import pyarrow as pa

from penstock.postgres.types.builtin import BUILTIN_TYPES
from penstock.schema import Column

_INTEGERS = tuple(BUILTIN_TYPES[name][0] for name in ("int2", "int4", "int8"))
_FLOATS = tuple(BUILTIN_TYPES[name][0] for name in ("float4", "float8"))
_NUMERIC = BUILTIN_TYPES["numeric"][0]
_TEXTS = frozenset(BUILTIN_TYPES[name][0] for name in ("text", "varchar"))


class TypeChange(Enum):
    NONE = auto()
    """Every value is as it was, and of the same type."""
    WIDER = auto()
    """Every value is as it was, in a type that holds more."""
    OTHER = auto()
    """Nobody knows."""


def compare_types(before: tuple[int, int, pa.DataType], after: Column, *, is_rewritten: bool) -> TypeChange:
    """`before` is type, modifier and Arrow type of the same column. `is_rewritten`: the rows were written anew since then, as a whole."""
    oid, modifier, arrow_type = before
    if (oid, modifier, arrow_type) == (after.type_oid, after.type_modifier, after.arrow_type):
        return TypeChange.NONE
    if _is_wider_number(oid, after.type_oid):
        return TypeChange.WIDER
    if arrow_type == after.arrow_type:
        alike = oid == after.type_oid or {oid, after.type_oid} <= _TEXTS
        return TypeChange.NONE if alike and not is_rewritten else TypeChange.OTHER
    if oid == after.type_oid == _NUMERIC and _is_wider_decimal(arrow_type, after.arrow_type) and not is_rewritten:
        return TypeChange.WIDER
    return TypeChange.OTHER


def _is_wider_number(before: int, after: int) -> bool:
    return any(before in kind and after in kind and kind.index(before) < kind.index(after) for kind in (_INTEGERS, _FLOATS))


def _is_wider_decimal(before: pa.DataType, after: pa.DataType) -> bool:
    if not pa.types.is_decimal128(before) or not pa.types.is_decimal128(after):
        return False
    return bool(before.scale == after.scale and before.precision < after.precision)
