"""What decoding a column gives, and the two ways of casting that every family is built from.

A cast is tried on the whole column at once. Only when Arrow refuses it does a family look for the values that its type cannot hold, by
masks over the whole column again. A text that is neither a value of the type nor one of the known exceptions is not Postgres output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ProtocolError

NULL_TEXT = pa.scalar(None, pa.string())


@dataclass(frozen=True, slots=True)
class DecodedColumn:
    """Typed values. `inexact` marks those that the type cannot hold: null here, to be kept as text; None if there are none."""

    values: pa.Array
    inexact: pa.BooleanArray | None = None


@dataclass(frozen=True, slots=True)
class TextType:
    """How the text of one Postgres type is read."""

    arrow_type: Callable[[int], pa.DataType]
    """From the type modifier."""
    decode: Callable[[pa.StringArray, pa.DataType], DecodedColumn]


def fixed(arrow_type: pa.DataType) -> Callable[[int], pa.DataType]:
    """For types whose Arrow type does not depend on the modifier."""
    return lambda _modifier: arrow_type


def cast(values: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    try:
        return values.cast(arrow_type)
    except pa.ArrowInvalid:
        # Arrow's message holds the value, so it must not travel on.
        raise not_a_value(arrow_type) from None


def cast_all(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    """For types whose every value Arrow can hold."""
    return DecodedColumn(cast(values, arrow_type))


def cast_except(
    values: pa.StringArray, arrow_type: pa.DataType, find_inexact: Callable[[pa.StringArray], pa.BooleanArray]
) -> DecodedColumn:
    """For types with values that Arrow or Spark cannot hold; `find_inexact` is asked only when the plain cast fails."""
    try:
        return DecodedColumn(values.cast(arrow_type))
    except pa.ArrowInvalid:
        inexact = pc.fill_null(find_inexact(values), False)
    held = pc.if_else(inexact, NULL_TEXT, values)
    return DecodedColumn(cast(held, arrow_type), inexact)


def not_a_value(arrow_type: pa.DataType) -> ProtocolError:
    return ProtocolError(f"a text that Postgres does not write for a column read as {arrow_type}")
