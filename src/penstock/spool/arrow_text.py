"""Arrow types as text in manifests: `int64`, `decimal128(10, 2)`, `list<item: string>`, `map<string, string>`, `struct<a: int32>`.

What has no readable form that leads back to the very same type is stored as its Arrow IPC bytes instead, so every type can be stored.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from functools import lru_cache

import pyarrow as pa

from penstock.schema import GEOMETRY_TYPE

_IPC = "ipc:"
_NAMED: dict[str, pa.DataType] = {
    str(arrow_type): arrow_type
    for arrow_type in (
        *(pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64(), pa.string(), pa.binary(), pa.large_string(), pa.large_binary()),
        *(pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
        *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC")),
        *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
        # The only one with metadata, which the text does not show.
        *(pa.month_day_nano_interval(), GEOMETRY_TYPE),
    )
}
_DECIMAL = re.compile(r"decimal(128|256)\((\d+), (-?\d+)\)")
_NESTED = re.compile(r"(list|map|struct)<(.+)>")
_FIELD = re.compile(r"(\w+): (.+)")


@lru_cache(maxsize=4096)
def type_text(arrow_type: pa.DataType) -> str:
    text = str(arrow_type)
    if _readable(text) == arrow_type:
        return text
    return _IPC + base64.b64encode(pa.schema([pa.field("", arrow_type)]).serialize()).decode()


@lru_cache(maxsize=4096)
def parse_type(text: str) -> pa.DataType:
    if text.startswith(_IPC):
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text.removeprefix(_IPC)))).field(0).type
    found = _readable(text)
    if found is None:
        raise ValueError(f"not an arrow type: {text!r}")
    return found


def _readable(text: str) -> pa.DataType | None:
    if text in _NAMED:
        return _NAMED[text]
    if match := _DECIMAL.fullmatch(text):
        make = pa.decimal128 if match[1] == "128" else pa.decimal256
        return make(int(match[2]), int(match[3]))
    match = _NESTED.fullmatch(text)
    return _nested(match[1], list(_parts(match[2]))) if match else None


def _nested(kind: str, parts: list[str]) -> pa.DataType | None:
    if kind == "map":
        types = [_readable(part) for part in parts]
        return pa.map_(*types) if len(types) == 2 and None not in types else None
    fields = [_FIELD.fullmatch(part) for part in parts]
    named = [(match[1], _readable(match[2])) for match in fields if match is not None]
    if len(named) < len(parts) or any(found is None for _, found in named):
        return None
    if kind == "list":
        return pa.list_(named[0][1]) if [name for name, _ in named] == ["item"] else None
    return pa.struct(named)


def _parts(text: str) -> Iterator[str]:
    """Cut at the commas that lie in no brackets."""
    depth = start = 0
    for at, sign in enumerate(text):
        depth += (sign in "<(") - (sign in ">)")
        if depth == 0 and text.startswith(", ", at):
            yield text[start:at]
            start = at + 2
    yield text[start:]
