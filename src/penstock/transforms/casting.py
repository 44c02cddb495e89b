"""Casts of columns. A value that the new type cannot hold is never rounded, cut or set to null: its row is rejected."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation, Overflow
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.arrays import Bools, as_bools, bitmap
from penstock.transforms.texts import by_value, plain_text

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
_OIDS: Final = {"string": 25, "boolean": 16, "smallint": 21, "int": 23, "bigint": 20, "double": 701, "date": 1082}
_OIDS_OF_TIMES: Final = {"timestamp": 1184, "timestamp_ntz": 1114}
_NUMERIC_OID = 1700
_DECIMAL = re.compile(r"decimal\(\s*(\d{1,2})\s*,\s*(\d{1,2})\s*\)")
_ZONED = r":.*(Z|[+-]\d\d(:?\d\d)?)$"
_BOOLEANS: Final = {**dict.fromkeys(("t", "true", "y", "yes", "1"), True), **dict.fromkeys(("f", "false", "n", "no", "0"), False)}


def parse_cast(name: str) -> pa.DataType:
    """A type by its name in Spark SQL. `ValueError` for others."""
    plain = name.strip().lower()
    match = _DECIMAL.fullmatch(plain)
    if match is not None and 1 <= int(match[1]) <= 38 and int(match[2]) <= int(match[1]):
        return pa.decimal128(int(match[1]), int(match[2]))
    if plain not in TYPE_NAMES:
        raise ValueError(f"{name!r} is none of {', '.join(TYPE_NAMES)}, decimal(p,s)")
    return TYPE_NAMES[plain]


def postgres_type(arrow_type: pa.DataType) -> tuple[int, int]:
    """OID and modifier of the same type in Postgres."""
    if pa.types.is_decimal(arrow_type):
        return _NUMERIC_OID, (arrow_type.precision << 16 | arrow_type.scale) + 4
    name = next(name for name, known in TYPE_NAMES.items() if known == arrow_type)
    return {**_OIDS, **_OIDS_OF_TIMES}[name], -1


def can_cast(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether some values can be taken over; those that cannot are refused one by one."""
    if given == wanted or pa.types.is_string(given):
        return True
    if pa.types.is_nested(given) or pa.types.is_binary(given):
        return False
    if pa.types.is_string(wanted):
        return not pa.types.is_floating(given)
    if pa.types.is_temporal(given) or pa.types.is_temporal(wanted):
        return bool(pa.types.is_temporal(given) and pa.types.is_temporal(wanted)) and not _changes_zone(given, wanted)
    if pa.types.is_boolean(given) or pa.types.is_boolean(wanted):
        return bool(pa.types.is_integer(wanted))
    return not (pa.types.is_floating(given) and not pa.types.is_floating(wanted))


def _changes_zone(given: pa.DataType, wanted: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(given) and pa.types.is_timestamp(wanted)) and given.tz != wanted.tz


def keeps_apart(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values that differ differ still: a key must."""
    is_whole = pa.types.is_integer(given)
    wider = is_whole and pa.types.is_integer(wanted) and wanted.bit_width >= given.bit_width
    return bool(given == wanted or wider or (pa.types.is_string(wanted) and (is_whole or pa.types.is_date(given))))


def cast_values(values: pa.Array, wanted: pa.DataType, texts: pa.Array | None = None) -> tuple[pa.Array, Bools]:
    """Typed values, and which of them could not be had. `texts` are those of values that their own type could not hold."""
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
    held = pa.concat_arrays([_one(convert, encoded.dictionary[at : at + 1], wanted) for at in range(len(encoded.dictionary))])
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
        # Without a zone it is UTC, as everything is here.
        trimmed = pc.if_else(pc.match_substring_regex(trimmed, _ZONED), trimmed, pc.binary_join_element_wise(trimmed, "Z", ""))
    found = trimmed.cast(wanted)
    if pa.types.is_floating(wanted):
        _check_floats(trimmed, found)
    if pa.types.is_temporal(wanted):
        _check_years(found)
    return found


def _decimal(text: str, wanted: pa.DataType) -> Decimal:
    """Arrow parses some numbers that are too long wrongly, so Python parses them, and must not round."""
    exact = Context(prec=wanted.precision, traps=[Inexact, InvalidOperation, Overflow])
    try:
        number = Decimal(text, exact).quantize(Decimal((0, (1,), -wanted.scale)), context=exact)
    except DecimalException:
        raise _no_number() from None
    if not number.is_finite():
        raise _no_number()
    return number


def _no_number() -> pa.ArrowInvalid:
    return pa.ArrowInvalid("a text that is no such number")


def _check_floats(texts: pa.Array, found: pa.Array) -> None:
    """Arrow parses a number too large as infinity, and one too small as zero."""
    too_large = pc.and_(pc.is_inf(found), pc.match_substring_regex(texts, "[0-9]"))
    too_small = pc.and_(pc.equal(found, 0.0), pc.match_substring_regex(texts, "^[^eE]*[1-9]"))
    if pc.any(pc.or_(too_large, too_small)).as_py():
        raise _no_number()


def _check_years(found: pa.Array) -> None:
    """Spark and Python hold the years 1 to 9999."""
    years = pc.min_max(pc.year(found))
    if found.null_count < len(found) and not 1 <= years["min"].as_py() <= years["max"].as_py() <= 9999:
        raise pa.ArrowInvalid("a text that is no such time")


def _booleans(texts: pa.Array) -> pa.Array:
    plain = pc.utf8_lower(pc.utf8_trim(texts, " \t\n\r"))
    places = pc.index_in(plain, pa.array(list(_BOOLEANS), pa.string()))
    if places.null_count > texts.null_count:
        raise pa.ArrowInvalid("a text that is no boolean")
    answers = np.array(list(_BOOLEANS.values()))
    return pa.Array.from_buffers(pa.bool_(), len(answers), [None, bitmap(answers)]).take(places)
