"""Keyed hashes of values: the same value has the same hash in every table, by both roads and into every target; without the key nobody can
tell which value it was, nor try.

HMAC-SHA-256 of the value's text in one fixed form, as 64 hexadecimal digits. Null stays null. An array is hashed element by element, so
that it can still be unnested and joined.

| type | text |
|---|---|
| text, and all types that are read as text | itself |
| whole numbers | digits |
| numeric | digits without zeros at the end of the fraction: 1.50 is 1.5, and 2.00 is 2 |
| boolean | `true`, `false` |
| date | `2024-12-31` |
| timestamp | `2024-12-31 23:59:59.000000`; with time zone the same in UTC, and `Z` |
| real, double precision | the shortest decimal that reads as the same double; zero has no sign |
| bytea | the bytes themselves |
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable

import pyarrow as pa

from penstock.secret import Secret
from penstock.transforms.texts import by_value, with_elements

_NUMBER = re.compile(r"-?\d+\.\d+")


def can_hash(arrow_type: pa.DataType) -> bool:
    if pa.types.is_list(arrow_type):
        return can_hash(arrow_type.value_type)
    return not pa.types.is_nested(arrow_type)


def hashed_type(arrow_type: pa.DataType) -> pa.DataType:
    return pa.list_(hashed_type(arrow_type.value_type)) if pa.types.is_list(arrow_type) else pa.string()


def hash_values(values: pa.Array, key: Secret) -> pa.Array:
    """Values of a type that `can_hash`."""
    if pa.types.is_list(values.type):
        return with_elements(values, hash_values(values.flatten(), key))
    digest = _digester(key)
    return by_value(values, lambda value: digest(_text_of(value)), pa.string())


def hash_texts(texts: pa.Array, key: Secret, arrow_type: pa.DataType) -> pa.Array:
    """Of values that a column of this type cannot hold, from the text that Postgres writes."""
    digest = _digester(key)
    is_number = pa.types.is_decimal(arrow_type)
    found = [None if text is None else digest(_plain_number(text) if is_number else text) for text in texts.to_pylist()]
    return pa.array(found, pa.string())


def _digester(key: Secret) -> Callable[[str | bytes], str]:
    base = hmac.new(key.reveal().encode(), digestmod=hashlib.sha256)

    def digest(value: str | bytes) -> str:
        each = base.copy()
        each.update(value.encode() if isinstance(value, str) else value)
        return each.hexdigest()

    return digest


def _text_of(value: object) -> str | bytes:
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float_text(value)
    if hasattr(value, "isoformat"):
        return _time_text(value)
    return _plain_number(f"{value:f}") if hasattr(value, "as_tuple") else str(value)


def _plain_number(text: str) -> str:
    """Without zeros that tell nothing; `NaN` and the like as they are."""
    text = text.rstrip("0").rstrip(".") if _NUMBER.fullmatch(text) else text
    return "0" if text in ("-0", "") else text


def _float_text(value: float) -> str:
    return repr(value + 0.0).removesuffix(".0")


def _time_text(value: object) -> str:
    if not hasattr(value, "microsecond"):
        return str(value)  # a date
    text = f"{value:%Y-%m-%d %H:%M:%S.%f}"
    return text.rjust(26, "0") + ("Z" if getattr(value, "tzinfo", None) else "")
