"""Decode scalar types: bool, int2/int4/int8/oid, float4/float8, numeric, money, date and timestamps, and all
types that stay text. The session settings pin the output format: ISO dates, UTC, `lc_monetary = C`.

A numeric column with a declared precision of up to 38 digits becomes a decimal. For other numeric columns,
the type policy chooses between a decimal and text. The values `NaN` and infinity, and numbers with too many
digits before or after the point, are inexact in a decimal; trailing zeros do not count. Since Postgres 15 the
declared scale may be negative or greater than the precision. The decimal then gets more digits than the
declared precision, if that is possible.

Postgres stores money as a number of the smallest currency units, for example cents. The locale of the
session, not the value, decides how many decimal places it is printed with. With the pinned locale there are
always two.

Dates use the proleptic Gregorian calendar, as in Postgres, Arrow and Spark. Spark supports the years 1 to
9999, so infinity, BC and later years are inexact.

Types that stay text are the character types, uuid, json and xml, and all types without a Spark equivalent:
enums, ranges, network addresses, bit strings, geometric and composite types, times of day, intervals in ISO
8601, and extension types.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import UnreadableTextError
from penstock.postgres.types.column import (
    MAX_DIGITS,
    NULL_TEXT,
    DecodedColumn,
    TextType,
    TypePolicy,
    cast,
    cast_all,
    cast_except,
    fixed,
    not_a_value,
)


def check_encoding(values: pa.StringArray) -> None:
    """Raise an error if a text is not UTF-8. A SQL_ASCII database returns texts as the bytes that were
    stored, in any encoding.
    """
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        raise UnreadableTextError("a text that is not UTF-8") from None


def decode(values: pa.StringArray, _arrow_type: pa.DataType) -> DecodedColumn:
    check_encoding(values)
    return DecodedColumn(values)


FORMS = {
    "bit": "`101`",
    "bpchar": "with trailing blanks",
    "interval": "ISO 8601, `P1Y2M3DT4H5M6.7S`",
    "time": "including `24:00:00`",
    "timetz": "`12:00:00+05:30`",
    "varbit": "`101`",
}
"""The text format of types for which it is not obvious, for the reference page."""

TEXT_TYPES = {"text": TextType(fixed(pa.string()), decode)}


# Created once: if pandas is not installed, pyarrow tries to import it each time that it converts a Python
# value.
_WRITTEN = [(pa.scalar("t"), pa.scalar("f")), (pa.scalar("true"), pa.scalar("false"))]


def _decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    for true, false in _WRITTEN:
        decoded = pc.equal(values, true)
        if decoded.true_count + pc.equal(values, false).true_count + values.null_count == len(values):
            return DecodedColumn(decoded)
    raise not_a_value(arrow_type)


BOOLEAN_TYPES = {"bool": TextType(fixed(pa.bool_()), _decode)}


INTEGER_TYPES = {
    "int2": TextType(fixed(pa.int16()), cast_all),
    "int4": TextType(fixed(pa.int32()), cast_all),
    "int8": TextType(fixed(pa.int64()), cast_all),
    "oid": TextType(fixed(pa.int64()), cast_all),
}


FLOAT_TYPES = {
    "float4": TextType(fixed(pa.float32()), cast_all),
    "float8": TextType(fixed(pa.float64()), cast_all),
}


_NUMERIC_WRITTEN = r"^(-?[0-9]+(\.[0-9]+)?|NaN|-?Infinity)$"


def declared_decimal(modifier: int) -> pa.DataType | None:
    """Return the type that holds every number of a `numeric(p,s)` column; None if the modifier declares no
    precision, or more digits than a decimal has.
    """
    if modifier < 4:
        return None
    precision = (modifier - 4) >> 16 & 0xFFFF
    # Since Postgres 15 the scale has eleven bits with a sign. In earlier versions it has sixteen unsigned
    # bits, but is never above 1,000.
    scale = ((modifier - 4 & 0x7FF) ^ 0x400) - 0x400
    digits, places = max(precision - min(scale, 0), scale), max(scale, 0)
    return pa.decimal128(digits, places) if 1 <= digits <= MAX_DIGITS else None


def _arrow_type(modifier: int, policy: TypePolicy) -> pa.DataType:
    return declared_decimal(modifier) or policy.numeric_type


def _decode_numeric(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    if pa.types.is_string(arrow_type):
        return decode(values, arrow_type)
    if _may_wrap(values, arrow_type):
        return _decode_held(values, arrow_type)
    try:
        return DecodedColumn(values.cast(arrow_type))
    except pa.ArrowInvalid:
        return _decode_held(values, arrow_type)


def _may_wrap(values: pa.StringArray, arrow_type: pa.DataType) -> bool:
    """Whether Arrow's cast could return a wrong number without an error.

    It can do so if the digits before the point plus the scale exceed 38. It can also do so if a fraction has
    at least 39 digits more than the scale: Arrow then reads past its table of powers of ten.
    """
    scale = arrow_type.scale
    safe_digits = MAX_DIGITS - scale
    longest = pc.max(pc.binary_length(values)).as_py()
    if longest is None or longest <= safe_digits:
        return False
    unsafe = rf"^-?[0-9]{{{safe_digits + 1},}}|\.[0-9]{{{scale + MAX_DIGITS + 1},}}"
    return bool(pc.any(pc.match_substring_regex(values, unsafe)).as_py())


def _decode_held(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    whole_digits = arrow_type.precision - arrow_type.scale
    fits = rf"^-?0*[0-9]{{0,{whole_digits}}}(\.[0-9]{{0,{arrow_type.scale}}}0*)?$"
    inexact = pc.and_not(
        pc.match_substring_regex(values, _NUMERIC_WRITTEN), pc.match_substring_regex(values, fits)
    )
    held = pc.if_else(pc.fill_null(inexact, True), NULL_TEXT, values)
    # Remove trailing zeros of fractions, since Arrow counts them as digits. The remaining text ends in a
    # digit, as Postgres writes it.
    trimmed = pc.replace_substring_regex(held, r"(\.[0-9]*[1-9])0+$", r"\1")
    whole = pc.replace_substring_regex(trimmed, r"([0-9])\.0*$", r"\1")
    return DecodedColumn(cast(whole, arrow_type), pc.fill_null(inexact, False))


NUMERIC_TYPES = {
    "numeric": TextType(
        _arrow_type, _decode_numeric, "`NaN`, `Infinity`, `-Infinity`, more digits than the decimal has"
    )
}


def _decode_money(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    plain = pc.replace_substring(pc.replace_substring(values, "$", ""), ",", "")
    return DecodedColumn(cast(plain, arrow_type))


MONEY_TYPES = {"money": TextType(fixed(pa.decimal128(19, 2)), _decode_money)}


_BEYOND = r"^-?infinity$|^[0-9]{5,}-[0-9]{2}-[0-9]{2}|^[0-9]{4,}-[0-9]{2}-[0-9]{2}.* BC$"
_BEYOND_TEXT = "`infinity`, `-infinity`, BC, years after 9999"


def _beyond(values: pa.StringArray) -> pa.BooleanArray:
    return pc.match_substring_regex(values, _BEYOND)


def _decode_temporal(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    return cast_except(values, arrow_type, _beyond)


TEMPORAL_TYPES = {
    "date": TextType(fixed(pa.date32()), _decode_temporal, _BEYOND_TEXT),
    "timestamp": TextType(fixed(pa.timestamp("us")), _decode_temporal, _BEYOND_TEXT),
    "timestamptz": TextType(fixed(pa.timestamp("us", "UTC")), _decode_temporal, _BEYOND_TEXT),
}
