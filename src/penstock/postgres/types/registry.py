"""Which family reads which Postgres type.

A reader is known by name: that of the type for built-in ones and for those of extensions, `text` for everything that stays text. An
array's reader is its element's with `[]` behind it, or with the delimiter between the brackets where that is not a comma: `int4[]`,
`text[;]`. The name, with the Arrow type, is all that is needed to read a column; it travels with the column's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

import pyarrow as pa

from penstock.postgres.types import binary, boolean, floating, geometry, hstore, integer, money, numeric, temporal, text, vector
from penstock.postgres.types.builtin import BUILTIN_TYPES, DELIMITERS
from penstock.postgres.types.column import DecodedColumn, TextType, tolerant
from penstock.postgres.types.lists import list_of
from penstock.schema import Column

TEXT: Final = "text"

BUILTIN_READERS: Final[Mapping[str, TextType]] = {
    name: text_type
    for family in (boolean, integer, floating, numeric, money, text, binary, temporal)
    for name, text_type in family.TYPES.items()
}
EXTENSION_READERS: Final[Mapping[str, TextType]] = {
    name: text_type for family in (hstore, vector, geometry) for name, text_type in family.TYPES.items()
}


def array_reader(element: str, delimiter: str = ",") -> str:
    """The name of the reader of arrays, from that of the elements."""
    return f"{element}[{'' if delimiter == ',' else delimiter}]"


def named_reader(name: str) -> str:
    """The reader of a type by the type's own name."""
    return name if name in BUILTIN_READERS or name in EXTENSION_READERS else TEXT


def _by_oid() -> dict[int, str]:
    readers = {oid: named_reader(name) for name, (oid, _) in BUILTIN_TYPES.items()}
    for name, (_, array_oid) in BUILTIN_TYPES.items():
        if array_oid:
            readers[array_oid] = array_reader(named_reader(name), DELIMITERS.get(name, ","))
    return readers


_BY_OID: Final = _by_oid()


def builtin_reader(type_oid: int) -> str | None:
    """The reader of a type whose OID is the same in every database; None for all others."""
    return _BY_OID.get(type_oid)


@lru_cache(maxsize=1024)
def text_type(reader: str) -> TextType:
    """How a reader reads."""
    if reader.endswith("]"):
        element, _, delimiter = reader[:-1].rpartition("[")
        found = list_of(text_type(element), delimiter or ",")
        # An extension's type is known by its name alone, so its arrays are as well.
        return replace(found, decode=tolerant(found.decode)) if element in EXTENSION_READERS else found
    return BUILTIN_READERS.get(reader) or EXTENSION_READERS.get(reader) or text.TYPES[TEXT]


def decode_column(values: pa.StringArray, column: Column) -> DecodedColumn:
    """Type a column that Postgres has rendered as text.

    The result has the type `column.arrow_type` and is null where `values` is null or where the type cannot hold the value. One call takes
    less than 2 GiB of text: the offsets of a `StringArray` have 32 bits.
    """
    reader = column.reader or builtin_reader(column.type_oid) or TEXT
    decoded = text_type(reader).decode(values, column.arrow_type)
    if decoded.inexact is not None and decoded.inexact.true_count:
        # Their texts are kept as they are, whatever the type made of their bytes.
        text.check_encoding(values)
    return decoded
