"""Decode one column of Postgres text: the type policy, the result, and the casts from which the decoders of
the type families are built. A cast is tried on the whole column at once. Only if Arrow rejects it, the
decoder searches for the values that its type cannot hold, again with masks over the whole column. A text that
is neither a value of the type nor one of the known exceptions cannot come from Postgres, and is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ProtocolError
from penstock.options import TEXT, Option

MAX_DIGITS = 38
_DECIMAL = re.compile(r"decimal\(\s*(\d{1,2})\s*,\s*(\d{1,2})\s*\)")


@dataclass(frozen=True, slots=True)
class TypePolicy:
    """Type mapping of one capture. Its fields are options of the Spark source and of the connectors."""

    numeric: Annotated[
        str,
        Option(
            "Type of `numeric` without a precision or with more than 38 digits: `decimal(p,s)` or `string`."
        ),
    ] = "decimal(38,18)"
    on_unrepresentable: Annotated[
        str,
        Option(
            "For a value out of the range of its type: `null` writes NULL, and the exact text to `_exact`; "
            "`error` rejects the row.",
            TEXT.named("choice"),
        ),
    ] = "null"
    form: Annotated[str, Option("", is_internal=True)] = "typed"
    """`typed` or `text`. With `text`, every value stays the text that the source sends, which another
    Postgres can read unchanged.
    """

    DEFAULT: ClassVar[TypePolicy]

    def __post_init__(self) -> None:
        _parse_numeric(self.numeric)
        if self.on_unrepresentable not in ("null", "error"):
            raise ValueError(f"on_unrepresentable is 'null' or 'error', not {self.on_unrepresentable!r}")
        if self.form not in ("typed", "text"):
            raise ValueError(f"form is 'typed' or 'text', not {self.form!r}")

    @property
    def numeric_type(self) -> pa.DataType:
        return _parse_numeric(self.numeric)

    @property
    def is_text(self) -> bool:
        return self.form == "text"

    @property
    def writes(self) -> str:
        """A text that identifies the form of the values in the spool. It differs between policies that write
        different values.
        """
        return self.form if self.is_text else self.numeric

    @property
    def rejects_inexact(self) -> bool:
        return self.on_unrepresentable == "error"


def _parse_numeric(text: str) -> pa.DataType:
    if text == "string":
        return pa.string()
    match = _DECIMAL.fullmatch(text)
    if match is not None:
        precision, scale = int(match[1]), int(match[2])
        if 1 <= precision <= MAX_DIGITS and scale <= precision:
            return pa.decimal128(precision, scale)
    raise ValueError(f"numeric is 'string' or decimal(p,s) with at most {MAX_DIGITS} digits, not {text!r}")


TypePolicy.DEFAULT = TypePolicy()


NULL_TEXT = pa.scalar(None, pa.string())
WRITTEN_OTHERWISE = "values in another text form"


@dataclass(frozen=True, slots=True)
class DecodedColumn:
    """Typed values. `inexact` marks the values that the type cannot hold: they are null here, and their text
    is kept. It is None if there are no such values.
    """

    values: pa.Array
    inexact: pa.BooleanArray | None = None


Decode = Callable[[pa.StringArray, pa.DataType], DecodedColumn]


@dataclass(frozen=True, slots=True)
class TextType:
    """The decoder for the text of one Postgres type."""

    arrow_type: Callable[[int, TypePolicy], pa.DataType]
    """Function that returns the Arrow type for a type modifier and a type policy."""
    decode: Decode
    beyond: str = ""
    """A description of the values that the Arrow type cannot hold, for the reference page."""


def fixed(arrow_type: pa.DataType) -> Callable[[int, TypePolicy], pa.DataType]:
    """Return a function for `TextType.arrow_type` that always returns `arrow_type`."""
    return lambda _modifier, _policy: arrow_type


def cast(values: pa.StringArray, arrow_type: pa.DataType) -> pa.Array:
    try:
        return values.cast(arrow_type)
    except pa.ArrowInvalid:
        # Arrow's message contains the value, so it must not be chained.
        raise not_a_value(arrow_type) from None


def cast_all(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    """Cast a column of a type for which Arrow can hold every value."""
    return DecodedColumn(cast(values, arrow_type))


def cast_except(
    values: pa.StringArray, arrow_type: pa.DataType, find_inexact: Callable[[pa.StringArray], pa.BooleanArray]
) -> DecodedColumn:
    """Cast a column of a type with values that Arrow or Spark cannot hold. `find_inexact` returns a mask of
    these values; it is called only if the plain cast fails.
    """
    try:
        return DecodedColumn(values.cast(arrow_type))
    except pa.ArrowInvalid:
        inexact = pc.fill_null(find_inexact(values), False)
    held = pc.if_else(inexact, NULL_TEXT, values)
    return DecodedColumn(cast(held, arrow_type), inexact)


def tolerant(decode: Decode) -> Decode:
    """Return a decoder for a type that is identified only by its name. A text in another format does not
    raise an error but is inexact, since an unrelated type may have the same name.
    """

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
    return ProtocolError(f"a text that Postgres does not print for a column decoded as {arrow_type}")
