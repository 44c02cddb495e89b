"""A table with the columns id, note and size, and its rows and keys."""

from __future__ import annotations

import pyarrow as pa

from penstock.schema import Column, TableName, TableSchema
from tests.support.sinks.source import NULL, Key, Row, Value

ITEMS = TableSchema(
    16401,
    TableName("public", "items"),
    (
        Column("id", pa.int64(), 20),
        Column("note", pa.string(), 25),
        Column("size", pa.decimal128(38, 18), 1700),
    ),
    ("id",),
)


def item(key: int, note: str | None = "first", size: Value = NULL) -> Row:
    return {"id": Value(key), "note": Value(note), "size": size}


def at(key: int) -> Key:
    return (Value(key),)
