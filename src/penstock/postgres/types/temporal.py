"""date, timestamp and timestamptz in ISO style, the last one in UTC, as the session settings of both roads pin.

Spark knows the years 1 to 9999. The infinities, BC and later years are inexact.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.column import DecodedColumn, TextType, cast_except, fixed

_BEYOND = r"^-?infinity$|^[0-9]{5,}-[0-9]{2}-[0-9]{2}|^[0-9]{4,}-[0-9]{2}-[0-9]{2}.* BC$"


def _beyond(values: pa.StringArray) -> pa.BooleanArray:
    return pc.match_substring_regex(values, _BEYOND)


def _decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    return cast_except(values, arrow_type, _beyond)


TYPES = {
    1082: TextType(fixed(pa.date32()), _decode),
    1114: TextType(fixed(pa.timestamp("us")), _decode),
    1184: TextType(fixed(pa.timestamp("us", "UTC")), _decode),
}
