"""Columns of an Iceberg table as Arrow fields with field ids, and column names that Iceberg reserves.

Iceberg reserves `_deleted`, a column that the mode `soft_delete` adds. In the table that column is called
`_is_deleted`; all other code uses the name in the layout.

Files of the table have the field ids in their schema, nested fields included. Types that Iceberg lacks are
stored as the next larger type: smallint as int.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import pyarrow as pa

from penstock.errors import SinkRefusedError
from penstock.sinks.modes import DELETED, Layout, Mode

IS_DELETED = "_is_deleted"
_RESERVED = frozenset(
    {"_file", "_pos", DELETED, "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number"}
)


def renamed_columns(mode: Mode) -> dict[str, str]:
    """The columns of the mode that have another name in the table: the name in the table, by the name in the
    layout.
    """
    return {DELETED: IS_DELETED} if DELETED in mode.added_names else {}


def stored_name(name: str, mode: Mode) -> str:
    """The name that a column of the layout has in the table."""
    return renamed_columns(mode).get(name, name)


def own_names(columns: pa.Schema, mode: Mode) -> pa.Schema:
    """The table's columns with their names in the layout."""
    own = {stored: name for name, stored in renamed_columns(mode).items()}
    if not own:
        return columns
    return pa.schema([field.with_name(own.get(field.name, field.name)) for field in columns])


def check_names(layout: Layout, place: str) -> None:
    """Raise `SinkRefusedError` if the name of a source column is reserved in the table."""
    taken = _taken(layout.columns.names, _RESERVED | set(renamed_columns(layout.mode).values()))
    if taken is not None:
        raise SinkRefusedError(
            f"{place} cannot have a column named {taken!r}: Iceberg, or the mode {layout.mode}, reserves "
            "that name",
            hint="rename the column, exclude the table, or leave the column out by a transform",
        )


def _taken(names: Iterable[str], reserved: frozenset[str]) -> str | None:
    return next((name for name in names if name.casefold() in reserved), None)


FIELD_ID = b"PARQUET:field_id"

_PRIMITIVES: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "string": pa.string(),
    "binary": pa.binary(),
}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


def parse_columns(document: Mapping[str, Any]) -> pa.Schema:
    """Convert a schema in Iceberg's JSON to the Arrow schema of the table's files. Raises `ValueError` for
    types that Penstock's tables do not have.
    """
    return pa.schema([_field(each["name"], each["type"], each["id"]) for each in document["fields"]])


def _field(name: str, found: str | Mapping[str, Any], number: int) -> pa.Field:
    return pa.field(name, _type(found), metadata={FIELD_ID: str(number).encode()})


def _type(found: str | Mapping[str, Any]) -> pa.DataType:
    if isinstance(found, str):
        if match := _DECIMAL.fullmatch(found):
            return pa.decimal128(int(match[1]), int(match[2]))
        if found not in _PRIMITIVES:
            raise ValueError(f"unsupported Iceberg type {found}")
        return _PRIMITIVES[found]
    if found["type"] == "list":
        return pa.list_(_field("element", found["element"], found["element-id"]))
    if found["type"] == "map":
        key = _field("key", found["key"], found["key-id"]).with_nullable(False)
        return pa.map_(key, _field("value", found["value"], found["value-id"]))
    return pa.struct([_field(each["name"], each["type"], each["id"]) for each in found["fields"]])


def stored_type(arrow_type: pa.DataType) -> pa.DataType:
    """The type that the table has for a column of `arrow_type`. Its nested field ids are placeholders."""
    return _type(type_document(arrow_type))


def type_document(arrow_type: pa.DataType, numbers: Iterator[int] | None = None) -> str | dict[str, Any]:
    """The type in Iceberg's JSON, with placeholders as nested field ids. Raises `ValueError` if Iceberg has
    no such type.
    """
    numbers = numbers or count(2)
    for name, each in _PRIMITIVES.items():
        if each == arrow_type:
            return name
    if pa.types.is_int8(arrow_type) or pa.types.is_int16(arrow_type):
        return "int"
    if pa.types.is_decimal128(arrow_type):
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    if pa.types.is_list(arrow_type):
        return {
            "type": "list",
            "element-required": False,
            **_inner("element", arrow_type.value_type, numbers),
        }
    if pa.types.is_map(arrow_type):
        key, value = (
            _inner("key", arrow_type.key_type, numbers),
            _inner("value", arrow_type.item_type, numbers),
        )
        return {"type": "map", "value-required": False, **key, **value}
    if pa.types.is_struct(arrow_type):
        inner = [
            {
                "id": next(numbers),
                "name": each.name,
                "required": False,
                "type": type_document(each.type, numbers),
            }
            for each in arrow_type
        ]
        return {"type": "struct", "fields": inner}
    raise ValueError(f"Iceberg has no type for {arrow_type}")


def _inner(role: str, arrow_type: pa.DataType, numbers: Iterator[int]) -> dict[str, Any]:
    return {f"{role}-id": next(numbers), role: type_document(arrow_type, numbers)}


def field_ids(columns: pa.Schema, names: Sequence[str]) -> list[int]:
    return [int(columns.field(name).metadata[FIELD_ID]) for name in names]


def numbers_of(columns: pa.Schema) -> dict[int, int]:
    """The index of each column of a file, by field id."""
    return {
        int(field.metadata[FIELD_ID]): at
        for at, field in enumerate(columns)
        if FIELD_ID in (field.metadata or {})
    }


def by_number(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Convert the rows of a file to the table's current columns, matched by field id. Columns that the file
    lacks are null.
    """
    found = numbers_of(rows.schema)
    arrays = [
        _cast(rows.column(found[number]), field.type)
        if number in found
        else pa.nulls(rows.num_rows, field.type)
        for number, field in zip(field_ids(columns, columns.names), columns, strict=True)
    ]
    return pa.table(arrays, schema=columns)


def delete_columns(columns: pa.Schema, identity: Sequence[str]) -> tuple[str, ...]:
    """The columns of a row's identity that an equality delete may name: neither nested nor float."""
    types = {name: columns.field(name).type for name in identity}
    return tuple(
        name
        for name, each in types.items()
        if not pa.types.is_nested(each) and not pa.types.is_floating(each)
    )


def fitted(table: pa.Table, columns: pa.Schema) -> pa.Table:
    """Select and cast `columns`, the schema of a file with field ids, from `table`."""
    arrays = [_cast(table.column(field.name), field.type) for field in columns]
    return pa.table(arrays, schema=columns)


def filled(rows: pa.Table, fills: Mapping[str, pa.Scalar]) -> pa.Table:
    """Set the columns of `fills` to their default values. The rows themselves have no values for them."""
    columns = [
        pa.repeat(fills[field.name].cast(field.type), rows.num_rows)
        if field.name in fills
        else rows.column(field.name)
        for field in rows.schema
    ]
    return pa.table(columns, schema=rows.schema)


def _cast(column: pa.ChunkedArray, arrow_type: pa.DataType) -> pa.ChunkedArray:
    return column if column.type.equals(arrow_type) else column.cast(arrow_type)
