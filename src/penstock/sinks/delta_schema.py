"""A Delta table's columns as Arrow has them: under the table's own names, and under those that its files carry.

The two differ where the table maps its columns (`delta.columnMapping.mode`): there every name, also inside of a struct, has another one in
the files, which never changes. The order of the columns is the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from penstock.sinks.delta_state import Metadata, Unsupported

_PHYSICAL_NAME = "delta.columnMapping.physicalName"
_FIELD_ID = "delta.columnMapping.id"

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


def table_schema(metadata: Metadata) -> pa.Schema:
    """With the names that people see."""
    return pa.schema([_field(field, physical=False) for field in metadata.fields])


def file_schema(metadata: Metadata) -> pa.Schema:
    """With the names that the files carry, and the numbers of the columns where they have one."""
    return pa.schema([_field(field, physical=True) for field in metadata.fields])


def _field(found: Mapping[str, Any], *, physical: bool) -> pa.Field:
    metadata = found.get("metadata") or {}
    name = metadata.get(_PHYSICAL_NAME, found["name"]) if physical else found["name"]
    number = {"PARQUET:field_id": str(metadata[_FIELD_ID])} if physical and _FIELD_ID in metadata else None
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
