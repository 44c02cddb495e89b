"""numeric. Declared within 38 digits it is that decimal; otherwise what the policy says, and what does not fit stays text.

`NaN`, the infinities and numbers with too many digits on either side of the point are inexact; zeros at the end do not count. Since
Postgres 15 the scale may be negative or above the precision; a decimal with room for it is taken where there is one.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types import text
from penstock.postgres.types.column import NULL_TEXT, DecodedColumn, TextType, cast
from penstock.postgres.types.policy import MAX_DIGITS, TypePolicy

_WRITTEN = r"^(-?[0-9]+(\.[0-9]+)?|NaN|-?Infinity)$"


def _arrow_type(modifier: int, policy: TypePolicy) -> pa.DataType:
    if modifier < 4:
        return policy.numeric_type
    precision = (modifier - 4) >> 16 & 0xFFFF
    # Eleven bits with a sign since Postgres 15; before, sixteen without, but never above a thousand.
    scale = ((modifier - 4 & 0x7FF) ^ 0x400) - 0x400
    digits, places = max(precision - min(scale, 0), scale), max(scale, 0)
    return pa.decimal128(digits, places) if 1 <= digits <= MAX_DIGITS else policy.numeric_type


def _decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    if pa.types.is_string(arrow_type):
        return text.decode(values, arrow_type)
    if _may_wrap(values, arrow_type):
        return _decode_held(values, arrow_type)
    try:
        return DecodedColumn(values.cast(arrow_type))
    except pa.ArrowInvalid:
        return _decode_held(values, arrow_type)


def _may_wrap(values: pa.StringArray, arrow_type: pa.DataType) -> bool:
    """Whether Arrow's cast could return a wrong number without an error.

    It does so where the digits before the point plus the scale exceed 38, and where a fraction has at least 39 digits more than the scale
    (Arrow then reads past its table of powers of ten).
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
    inexact = pc.and_not(pc.match_substring_regex(values, _WRITTEN), pc.match_substring_regex(values, fits))
    held = pc.if_else(pc.fill_null(inexact, True), NULL_TEXT, values)
    # Arrow counts the zeros at the end of a fraction as digits. What is left ends in a digit, as it does in what Postgres writes.
    trimmed = pc.replace_substring_regex(held, r"(\.[0-9]*[1-9])0+$", r"\1")
    whole = pc.replace_substring_regex(trimmed, r"([0-9])\.0*$", r"\1")
    return DecodedColumn(cast(whole, arrow_type), pc.fill_null(inexact, False))


TYPES = {"numeric": TextType(_arrow_type, _decode, "`NaN`, `Infinity`, `-Infinity`, more digits than the decimal has")}
