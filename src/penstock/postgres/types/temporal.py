"""date, timestamp and timestamptz in ISO style, the last one in UTC, as the session settings of both roads pin.

The calendar is the proleptic Gregorian one, as in Postgres, Arrow and Spark. Spark knows the years 1 to 9999. The infinities, BC and
later years are inexact.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.column import DecodedColumn, TextType, cast_except, fixed

_BEYOND = r"^-?infinity$|^[0-9]{5,}-[0-9]{2}-[0-9]{2}|^[0-9]{4,}-[0-9]{2}-[0-9]{2}.* BC$"
_BEYOND_TEXT = "`infinity`, `-infinity`, BC, years after 9999"


def _beyond(values: pa.StringArray) -> pa.BooleanArray:
    return pc.match_substring_regex(values, _BEYOND)


def _decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    return cast_except(values, arrow_type, _beyond)


TYPES = {
    "date": TextType(fixed(pa.date32()), _decode, _BEYOND_TEXT),
    "timestamp": TextType(fixed(pa.timestamp("us")), _decode, _BEYOND_TEXT),
    "timestamptz": TextType(fixed(pa.timestamp("us", "UTC")), _decode, _BEYOND_TEXT),
}
