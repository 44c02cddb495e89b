"""Everything that stays text, as Postgres writes it.

These are the character types, uuid, json and xml, and all types without a Spark equal: enums, ranges, network addresses, bit strings,
geometric and composite types, times of day, intervals in ISO 8601, and whatever an extension brings along.
"""

from __future__ import annotations

import pyarrow as pa

from penstock.errors import UnreadableTextError
from penstock.postgres.types.column import DecodedColumn, TextType, fixed


def check_encoding(values: pa.StringArray) -> None:
    """Raise if a text is not UTF-8. A SQL_ASCII database hands out whatever bytes were put in."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        raise UnreadableTextError("a text that is not UTF-8") from None


def decode(values: pa.StringArray, _arrow_type: pa.DataType) -> DecodedColumn:
    check_encoding(values)
    return DecodedColumn(values)


FORMS = {
    "bit": "`101`",
    "bpchar": "with its blanks",
    "interval": "ISO 8601, `P1Y2M3DT4H5M6.7S`",
    "time": "`24:00:00` too",
    "timetz": "`12:00:00+05:30`",
    "varbit": "`101`",
}
"""For the reference: how Postgres writes types whose text is not plain."""

TYPES = {"text": TextType(fixed(pa.string()), decode)}
