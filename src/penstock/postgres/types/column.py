"""What decoding a column gives, and the ways of casting that every family is built from.

A cast is tried on the whole column at once. Only when Arrow refuses it does a family look for the values that its type cannot hold, by
masks over the whole column again. A text that is neither a value of the type nor one of the known exceptions is not Postgres output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ProtocolError
from penstock.postgres.types.policy import TypePolicy

NULL_TEXT = pa.scalar(None, pa.string())
WRITTEN_OTHERWISE = "what is not written so"


@dataclass(frozen=True, slots=True)
class DecodedColumn:
    """Typed values. `inexact` marks those that the type cannot hold: null here, to be kept as text; None if there are none."""

    values: pa.Array
    inexact: pa.BooleanArray | None = None


Decode = Callable[[pa.StringArray, pa.DataType], DecodedColumn]


@dataclass(frozen=True, slots=True)
class TextType:
    """How the text of one Postgres type is read."""

    arrow_type: Callable[[int, TypePolicy], pa.DataType]
    """From the type modifier and what the operator chose."""
    decode: Decode
    beyond: str = ""
    """For the reference: which values the Arrow type cannot hold."""


def fixed(arrow_type: pa.DataType) -> Callable[[int, TypePolicy], pa.DataType]:
    """For types whose Arrow type depends on nothing."""
    return lambda _modifier, _policy: arrow_type


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


def tolerant(decode: Decode) -> Decode:
    """For types that are known by their name alone: what is not written as expected is inexact, since the type may be somebody else's."""

    def decode_each(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
        try:
            return decode(values, arrow_type)
        except ProtocolError:
            parts = [_decode_one(decode, values[row : row + 1], arrow_type) for row in range(len(values))]
        inexact = pa.concat_arrays([part.is_null() for part in parts])
        return DecodedColumn(pa.concat_arrays(parts), pc.and_(inexact, values.is_valid()))

    return decode_each


def _decode_one(decode: Decode, value: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    try:
        return decode(value, arrow_type).values
    except ProtocolError:
        return pa.nulls(1, arrow_type)


def not_a_value(arrow_type: pa.DataType) -> ProtocolError:
    return ProtocolError(f"a text that Postgres does not write for a column read as {arrow_type}")
