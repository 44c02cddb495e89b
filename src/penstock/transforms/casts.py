"""Casts of column values, and values as plain text.

A value that the new type cannot hold is never rounded, truncated or set to null; its row is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation, Overflow
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Bools, as_bools, bitmap
from penstock.postgres.types.column import TypePolicy
from penstock.postgres.types.registry import TEXT, builtin_reader, text_type
from penstock.schema import Column


def is_text_form(column: Column) -> bool:
    """Whether the column's values are stored as Postgres text, whatever their type is. This is so for a
    Postgres target.
    """
    return column.reader == TEXT


def typed(column: Column) -> Column:
    """Return the column with the Arrow type of its Postgres type, also if its values are stored as text.
    Enums and extension types have the type string.
    """
    if not is_text_form(column):
        return column
    reader = builtin_reader(column.type_oid) or TEXT
    return replace(
        column, arrow_type=text_type(reader).arrow_type(column.type_modifier, TypePolicy.DEFAULT), reader=""
    )


def plain_text(values: pa.Array) -> pa.Array:
    """Convert values to the text that Spark's CAST gives and that Postgres can parse. Does not support
    floats, because Spark and Postgres write them differently.
    """
    if pa.types.is_string(values.type):
        return values
    if pa.types.is_decimal(values.type):
        return by_value(values, lambda value: f"{value:f}", pa.string())
    if pa.types.is_timestamp(values.type):
        # Arrow, unlike Python, writes years after 9999, which Spark can compute.
        return pc.replace_substring_regex(values.cast(pa.string()), r"\.?0*Z?$", "")
    return values.cast(pa.string())


def array_text(values: pa.Array) -> pa.Array:
    """Convert lists of texts to text in Postgres' array syntax."""
    return pa.array([None if each is None else _array_text(each) for each in values.to_pylist()], pa.string())


def with_elements(values: pa.ListArray, elements: pa.Array) -> pa.ListArray:
    """Return lists with the lengths and nulls of `values`, but with other elements. `elements` has one for
    each element of `values.flatten()`.
    """
    lengths = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    return pa.ListArray.from_arrays(offsets, elements, mask=values.is_null() if values.null_count else None)


def by_value(values: pa.Array, function: Callable[..., object], arrow_type: pa.DataType) -> pa.Array:
    """Apply `function` to each value, once per distinct value. Null stays null."""
    encoded = values.dictionary_encode()
    return pa.array([function(value) for value in encoded.dictionary.to_pylist()], arrow_type).take(
        encoded.indices
    )


def _array_text(values: list[str | None]) -> str:
    return "{" + ",".join("NULL" if value is None else f'"{_escaped(value)}"' for value in values) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


TYPE_NAMES: Final = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_OIDS: Final = {
    "string": 25,
    "boolean": 16,
    "smallint": 21,
    "int": 23,
    "bigint": 20,
    "double": 701,
    "date": 1082,
}
_OIDS_OF_TIMES: Final = {"timestamp": 1184, "timestamp_ntz": 1114}
_NUMERIC_OID = 1700
_DECIMAL = re.compile(r"decimal\(\s*(\d{1,2})\s*,\s*(\d{1,2})\s*\)")
_ZONED = r":.*(Z|[+-]\d\d(:?\d\d)?)$"
_BOOLEANS: Final = {
    **dict.fromkeys(("t", "true", "y", "yes", "1"), True),
    **dict.fromkeys(("f", "false", "n", "no", "0"), False),
}


def parse_cast(name: str) -> pa.DataType:
    """Return the Arrow type for a Spark SQL type name. Raises `ValueError` for an unsupported name."""
    plain = name.strip().lower()
    match = _DECIMAL.fullmatch(plain)
    if match is not None and 1 <= int(match[1]) <= 38 and int(match[2]) <= int(match[1]):
        return pa.decimal128(int(match[1]), int(match[2]))
    if plain not in TYPE_NAMES:
        raise ValueError(
            f"{name!r} is not a supported type; use one of {', '.join(TYPE_NAMES)}, decimal(p,s)"
        )
    return TYPE_NAMES[plain]


def postgres_type(arrow_type: pa.DataType) -> tuple[int, int]:
    """Return the OID and the type modifier of the Postgres type for one of the types that `parse_cast`
    returns.
    """
    if pa.types.is_decimal(arrow_type):
        return _NUMERIC_OID, (arrow_type.precision << 16 | arrow_type.scale) + 4
    name = next(name for name, known in TYPE_NAMES.items() if known == arrow_type)
    return {**_OIDS, **_OIDS_OF_TIMES}[name], -1


def can_cast(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether the cast can succeed for some values. A row whose value cannot be cast is rejected."""
    if given == wanted or pa.types.is_string(given):
        return True
    if pa.types.is_nested(given) or pa.types.is_binary(given):
        return False
    if pa.types.is_string(wanted):
        return not pa.types.is_floating(given)
    if pa.types.is_temporal(given) or pa.types.is_temporal(wanted):
        return bool(pa.types.is_temporal(given) and pa.types.is_temporal(wanted)) and not _changes_zone(
            given, wanted
        )
    if pa.types.is_boolean(given) or pa.types.is_boolean(wanted):
        return bool(pa.types.is_integer(wanted))
    return not (pa.types.is_floating(given) and not pa.types.is_floating(wanted))


def _changes_zone(given: pa.DataType, wanted: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(given) and pa.types.is_timestamp(wanted)) and given.tz != wanted.tz


def keeps_apart(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether the cast maps different values to different values, which a key requires."""
    is_whole = pa.types.is_integer(given)
    wider = is_whole and pa.types.is_integer(wanted) and wanted.bit_width >= given.bit_width
    return bool(
        given == wanted or wider or (pa.types.is_string(wanted) and (is_whole or pa.types.is_date(given)))
    )


def cast_values(
    values: pa.Array, wanted: pa.DataType, texts: pa.Array | None = None
) -> tuple[pa.Array, Bools]:
    """Cast values. Returns the results, and a mask of the casts that failed. `texts`: the exact text of
    values that the source type cannot hold, null for all other values.
    """
    found, failed = _cast(values, wanted)
    if texts is not None:
        exact, also = _cast(texts, wanted)
        found = pc.if_else(texts.is_valid(), exact, found)
        failed |= also
    return found, failed


def _cast(values: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, Bools]:
    convert = _converter(values.type, wanted)
    try:
        return convert(values), np.zeros(len(values), np.bool_)
    except pa.ArrowInvalid:
        pass
    encoded = values.dictionary_encode()
    held = pa.concat_arrays(
        [_one(convert, encoded.dictionary[at : at + 1], wanted) for at in range(len(encoded.dictionary))]
    )
    found = held.take(encoded.indices)
    return found, as_bools(pc.and_(found.is_null(), values.is_valid()))


def _one(convert: Callable[[pa.Array], pa.Array], value: pa.Array, wanted: pa.DataType) -> pa.Array:
    try:
        return convert(value)
    except pa.ArrowInvalid:
        return pa.nulls(1, wanted)


def _converter(given: pa.DataType, wanted: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    if pa.types.is_string(wanted):
        return plain_text
    if pa.types.is_string(given):
        return _booleans if pa.types.is_boolean(wanted) else lambda values: _parsed(values, wanted)
    if pa.types.is_date(wanted):
        return lambda values: values.cast(wanted, safe=False)
    if pa.types.is_decimal(wanted) and pa.types.is_integer(given):
        return lambda values: values.cast(pa.decimal128(19, 0)).cast(wanted)
    return lambda values: values.cast(wanted)


def _parsed(texts: pa.Array, wanted: pa.DataType) -> pa.Array:
    trimmed = pc.utf8_trim(texts, " \t\n\r")
    if pa.types.is_decimal(wanted):
        return by_value(trimmed, lambda text: _decimal(text, wanted), wanted)
    if pa.types.is_timestamp(wanted) and wanted.tz:
        # a text without a time zone is in UTC
        trimmed = pc.if_else(
            pc.match_substring_regex(trimmed, _ZONED), trimmed, pc.binary_join_element_wise(trimmed, "Z", "")
        )
    found = trimmed.cast(wanted)
    if pa.types.is_floating(wanted):
        _check_floats(trimmed, found)
    if pa.types.is_temporal(wanted):
        _check_years(found)
    return found


def _decimal(text: str, wanted: pa.DataType) -> Decimal:
    """Parse a decimal without rounding. Uses Python's `Decimal`, because Arrow parses some overlong numbers
    incorrectly.
    """
    exact = Context(prec=wanted.precision, traps=[Inexact, InvalidOperation, Overflow])
    try:
        number = Decimal(text, exact).quantize(Decimal((0, (1,), -wanted.scale)), context=exact)
    except DecimalException:
        raise _no_number() from None
    if not number.is_finite():
        raise _no_number()
    return number


def _no_number() -> pa.ArrowInvalid:
    return pa.ArrowInvalid("a text that is not a number of this type")


def _check_floats(texts: pa.Array, found: pa.Array) -> None:
    """Raise an error for a float that is out of range. Arrow returns infinity for numbers that are too large,
    and zero for numbers that are too small.
    """
    too_large = pc.and_(pc.is_inf(found), pc.match_substring_regex(texts, "[0-9]"))
    too_small = pc.and_(pc.equal(found, 0.0), pc.match_substring_regex(texts, "^[^eE]*[1-9]"))
    if pc.any(pc.or_(too_large, too_small)).as_py():
        raise _no_number()


def _check_years(found: pa.Array) -> None:
    """Raise an error for a date or time outside the years 1 to 9999, which Spark and Python do not
    support.
    """
    years = pc.min_max(pc.year(found))
    if found.null_count < len(found) and not 1 <= years["min"].as_py() <= years["max"].as_py() <= 9999:
        raise pa.ArrowInvalid("a text that is not a date or time of this type")


def _booleans(texts: pa.Array) -> pa.Array:
    plain = pc.utf8_lower(pc.utf8_trim(texts, " \t\n\r"))
    places = pc.index_in(plain, pa.array(list(_BOOLEANS), pa.string()))
    if places.null_count > texts.null_count:
        raise pa.ArrowInvalid("a text that is not a boolean")
    answers = np.array(list(_BOOLEANS.values()))
    return pa.Array.from_buffers(pa.bool_(), len(answers), [None, bitmap(answers)]).take(places)
