"""Everything that stays text: the character types, uuid, json and jsonb, and every type without a Spark equal, as Postgres writes it."""

from __future__ import annotations

import pyarrow as pa

from penstock.errors import ProtocolError
from penstock.postgres.types.column import DecodedColumn, TextType, fixed


def _decode(values: pa.StringArray, _arrow_type: pa.DataType) -> DecodedColumn:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        # A SQL_ASCII database hands out whatever bytes were put in.
        raise ProtocolError("a text that is not UTF-8") from None
    return DecodedColumn(values)


TEXT = TextType(fixed(pa.string()), _decode)

TYPES = {
    18: TEXT,  # "char"
    19: TEXT,  # name
    25: TEXT,  # text
    114: TEXT,  # json
    1042: TEXT,  # bpchar
    1043: TEXT,  # varchar
    2950: TEXT,  # uuid
    3802: TEXT,  # jsonb
}
