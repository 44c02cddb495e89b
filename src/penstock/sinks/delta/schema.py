"""A Delta table's columns as Arrow has them: under the table's own names, and under those that its files carry.

The two differ where the table maps its columns (`delta.columnMapping.mode`): there every name, also inside of a struct, has another one in
the files, which never changes. The order of the columns is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from penstock.sinks.delta.state import Metadata, Unsupported

PHYSICAL_NAME = "delta.columnMapping.physicalName"
FIELD_ID = "delta.columnMapping.id"

_TYPES = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


_NAMES = {arrow_type: name for name, arrow_type in _TYPES.items()}


def type_document(arrow_type: pa.DataType, inner: Callable[[], dict[str, object]] = dict) -> str | dict[str, object]:
    """A type as the log writes it; `inner` gives the metadata of each column inside of it."""
    if arrow_type in _NAMES:
        return _NAMES[arrow_type]
    if pa.types.is_decimal128(arrow_type):
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    if pa.types.is_list(arrow_type):
        return {"type": "array", "elementType": type_document(arrow_type.value_type, inner), "containsNull": True}
    if pa.types.is_map(arrow_type):
        key, value = type_document(arrow_type.key_type, inner), type_document(arrow_type.item_type, inner)
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if pa.types.is_struct(arrow_type):
        fields = [
            {"name": each.name, "type": type_document(each.type, inner), "nullable": True, "metadata": inner()} for each in arrow_type
        ]
        return {"type": "struct", "fields": fields}
    raise Unsupported(f"a column of type {arrow_type} cannot be added to it")


def table_schema(metadata: Metadata) -> pa.Schema:
    """With the names that people see."""
    return pa.schema([_field(field, physical=False) for field in metadata.fields])


def file_schema(metadata: Metadata) -> pa.Schema:
    """With the names that the files carry, and the numbers of the columns where they have one."""
    return pa.schema([_field(field, physical=True) for field in metadata.fields])


def _field(found: Mapping[str, Any], *, physical: bool) -> pa.Field:
    metadata = found.get("metadata") or {}
    name = metadata.get(PHYSICAL_NAME, found["name"]) if physical else found["name"]
    number = {"PARQUET:field_id": str(metadata[FIELD_ID])} if physical and FIELD_ID in metadata else None
    return pa.field(name, _type(found["type"], physical=physical), metadata=number)


def _type(found: str | Mapping[str, Any], *, physical: bool) -> pa.DataType:
    if isinstance(found, str):
        if found in _TYPES:
            return _TYPES[found]
        if found.startswith("decimal("):
            precision, scale = found[len("decimal(") : -1].split(",")
            return pa.decimal128(int(precision), int(scale))
    elif found["type"] == "struct":
        return pa.struct([_field(field, physical=physical) for field in found["fields"]])
    elif found["type"] == "array":
        return pa.list_(_type(found["elementType"], physical=physical))
    elif found["type"] == "map":
        return pa.map_(_type(found["keyType"], physical=physical), _type(found["valueType"], physical=physical))
    raise Unsupported("it has a column of a type that is not known")
