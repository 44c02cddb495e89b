from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from penstock.change import EXACT
from penstock.position import Position
from penstock.postgres.target.state import TargetColumn
from penstock.postgres.types.column import TypePolicy
from penstock.postgres.types.registry import TypeResolver, decode_column
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.modes import Layout, Mode
from penstock.sinks.postgres.rows import (
    added_columns,
    constant_texts,
    in_key_order,
    parse_rows,
    stored_names,
    target_columns,
    text_blocks,
)

TIME = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
COLUMNS = pa.schema([("id", pa.string()), ("note", pa.string())])


@pytest.mark.parametrize(
    ("oid", "text"),
    [
        (20, "12"),
        (1700, "1.500"),
        (1700, "NaN"),
        (1007, "{1,NULL}"),
        (16, "t"),
        (1114, "infinity"),
        (17, "\\x00ff"),
        (99_999, "some enum"),
    ],
)
def test_C06_as_text_every_value_has_the_text_of_the_source_whatever_its_type(oid: int, text: str) -> None:
    column = TypeResolver(TypePolicy(form="text")).column("c", oid, -1)
    decoded = decode_column(pa.array([text, None]), column)
    assert (decoded.values.to_pylist(), decoded.inexact) == ([text, None], None)
    assert (column.arrow_type, column.type_oid) == (pa.string(), oid)


def test_types_that_mean_something_only_in_their_own_database_become_text() -> None:
    oids = {"int8": 20, "regclass": 2205, "regrole[]": 4097, "aclitem": 1033, "enum": 70_000, "jsonb[]": 3807}
    table = TableSchema(
        1, TableName("a", "b"), tuple(Column(name, pa.string(), oid) for name, oid in oids.items()), ()
    )
    same = [column.name for column in target_columns(table) if column.type_oid]
    assert same == ["int8", "jsonb[]"]


@pytest.mark.parametrize("mode", Mode)
def test_rows_of_every_mode_come_back_as_they_were_but_for_exact(mode: Mode) -> None:
    layout = Layout(COLUMNS, ("id",), mode)
    values = layout.mode.snapshot_values(Position.of(77), TIME)
    if mode is Mode.APPEND:
        values["_unchanged"] = None
    row = {"id": "1", "note": None, **values, EXACT: None}
    table = pa.Table.from_pylist([row, {**row, "id": "2", "note": "x"}], layout.schema)
    written = [
        [_as_postgres(column) for column in block] for block in text_blocks(table, stored_names(layout))
    ]
    assert parse_rows(written, layout).to_pylist() == table.to_pylist()


def _as_postgres(texts: pa.Array) -> pa.StringArray:
    """The server's text of booleans and times."""
    shown = {"true": "t", "false": "f"}
    return pa.array(
        [None if text is None else shown.get(text, text.replace("Z", "+00")) for text in texts.to_pylist()],
        pa.string(),
    )


def test_lists_of_names_are_written_as_arrays() -> None:
    layout = Layout(COLUMNS, (), Mode.APPEND)
    values = {**layout.mode.snapshot_values(Position.of(1), TIME), "_unchanged": ['a "b"', "c\\d", "e,f"]}
    texts = dict(
        zip([column.name for column in added_columns(layout)], constant_texts(layout, values), strict=True)
    )
    assert texts["_unchanged"] == r'{"a \"b\"","c\\d","e,f"}'
    assert texts["_commit_timestamp"] == "2026-01-02 03:04:05.000678Z"
    assert TargetColumn("_unchanged", 1009) in added_columns(layout)


def test_rows_are_in_the_order_of_their_key_and_whole() -> None:
    numbers = pa.table({"id": ["10", "9", "-1"], "note": ["ten", "nine", "minus"]})
    assert in_key_order(numbers, ["id"]).to_pydict() == {
        "id": ["-1", "9", "10"],
        "note": ["minus", "nine", "ten"],
    }
    mixed = pa.table({"a": ["x", "x", "b"], "n": ["2", "1", "3"]})
    assert in_key_order(mixed, ["a", "n"]).to_pydict() == {"a": ["b", "x", "x"], "n": ["3", "1", "2"]}
    assert in_key_order(mixed, []) is mixed
