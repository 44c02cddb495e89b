"""Which family reads which Postgres type. A type that no family names is text."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from penstock.postgres.types import binary, boolean, floating, integer, numeric, temporal, text
from penstock.postgres.types.column import DecodedColumn, TextType

_TYPES: Final[dict[int, TextType]] = {
    oid: text_type for family in (boolean, integer, floating, numeric, text, binary, temporal) for oid, text_type in family.TYPES.items()
}


def arrow_type(type_oid: int, type_modifier: int = -1) -> pa.DataType:
    """The Arrow type that values of a Postgres type get."""
    return _TYPES.get(type_oid, text.TEXT).arrow_type(type_modifier)


def decode_text(values: pa.StringArray, type_oid: int, type_modifier: int = -1) -> DecodedColumn:
    """Type a column that Postgres has rendered as text.

    The result has the type `arrow_type(type_oid, type_modifier)` and is null where `values` is null or where the type cannot hold the
    value. One call takes less than 2 GiB of text: the offsets of a `StringArray` have 32 bits.
    """
    text_type = _TYPES.get(type_oid, text.TEXT)
    return text_type.decode(values, text_type.arrow_type(type_modifier))
