"""Typed values as JSON text, exactly.

Whole and decimal numbers are JSON numbers with every digit; numeric without a bound has no zeros at its end. Floats are numbers, except for
`"NaN"`, `"Infinity"` and `"-Infinity"`. Texts are as they are, json and jsonb among them; bytea is `"\\x00ff"`, as in Postgres. Dates
and timestamps are ISO 8601, those with a time zone in UTC with a `Z`. Arrays are arrays, hstore and PostGIS shapes objects.
"""

from __future__ import annotations

import json
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.schema import Column

_CONTROL = r"[\x00-\x1f]"
_UNBOUNDED = -1


def json_column(values: pa.Array, column: Column) -> pa.Array:
    """The JSON text of every value; the text `null` for null."""
    return pc.fill_null(_texts(values, column), "null")


def _texts(values: pa.Array, column: Column) -> pa.Array:
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return values.cast(pa.string())
    if pa.types.is_string(kind):
        return _quoted(values)
    if pa.types.is_date(kind):
        return _framed(values.cast(pa.string()))
    if pa.types.is_timestamp(kind):
        return _framed(pc.strftime(values, "%Y-%m-%dT%H:%M:%S" + ("Z" if kind.tz else ""), locale="C"))
    if pa.types.is_floating(kind):
        return _floats(values)
    trims = pa.types.is_decimal(kind) and column.type_modifier == _UNBOUNDED
    return pa.array([None if value is None else _text(value, kind, trims=trims) for value in values.to_pylist()], pa.string())


def _floats(values: pa.Array) -> pa.Array:
    """As many digits as tell a value from its neighbours in its own type, which is what Postgres writes too."""
    texts = values.cast(pa.string())
    for text, shown in _NOT_FINITE.items():
        texts = pc.if_else(pc.equal(texts, text), shown, texts)
    return texts


def _quoted(values: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(values, _CONTROL)).as_py():
        return pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values.to_pylist()], pa.string())
    escaped = pc.replace_substring(pc.replace_substring(values, "\\", "\\\\"), '"', '\\"')
    return _framed(escaped)


def _framed(texts: pa.Array) -> pa.Array:
    quote = pa.scalar('"')
    return pc.binary_join_element_wise(quote, texts, quote, pa.scalar(""))


def _text(value: Any, kind: pa.DataType, *, trims: bool = False) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(_floats(pa.array([value], kind))[0])
    if isinstance(value, Decimal):
        return _digits(value, trims=trims)
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    if isinstance(value, list | dict):
        return _nested(value, kind)
    if isinstance(value, datetime | date | time):
        return f'"{value.isoformat().replace("+00:00", "Z")}"'
    return json.dumps(value, ensure_ascii=False)


_NOT_FINITE = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}


def _digits(value: Decimal, *, trims: bool) -> str:
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if trims and "." in text else text


def _nested(value: Any, kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        pairs = value.items() if isinstance(value, dict) else value
        return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{_text(item, kind.item_type)}" for name, item in pairs) + "}"
    if pa.types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return "{" + ",".join(f"{json.dumps(field.name)}:{_text(value[field.name], field.type)}" for field in fields) + "}"
    trims = pa.types.is_decimal(kind.value_type)
    return "[" + ",".join(_text(item, kind.value_type, trims=trims) for item in value) + "]"
