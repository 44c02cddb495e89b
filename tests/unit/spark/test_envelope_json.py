"""Envelopes: their JSON, value by value."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.change import change_schema
from penstock.schema import GEOMETRY_TYPE, Column, TableName, TableSchema
from penstock.spark.envelope import ENVELOPE_SCHEMA, json_column, to_envelopes

UNBOUNDED = pa.decimal128(38, 18)


def texts(values: list[object], kind: pa.DataType, modifier: int = 0) -> list[str]:
    return list(json_column(pa.array(values, kind), Column("c", kind, 0, modifier)).to_pylist())


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (9_007_199_254_740_993, pa.int64(), "9007199254740993"),
        (True, pa.bool_(), "true"),
        (Decimal("12.50"), pa.decimal128(12, 2), "12.50"),
        (Decimal("0.00"), pa.decimal128(12, 2), "0.00"),
        (Decimal("0.000000000000000001"), pa.decimal128(38, 18), "0.000000000000000001"),
        (0.1, pa.float32(), "0.1"),
        (1e300, pa.float64(), "1e+300"),
        (float("nan"), pa.float64(), '"NaN"'),
        (float("-inf"), pa.float32(), '"-Infinity"'),
        (b"\x00\xff", pa.binary(), '"\\\\x00ff"'),
        (date(2024, 2, 29), pa.date32(), '"2024-02-29"'),
        (date(1, 1, 1), pa.date32(), '"0001-01-01"'),
        (
            datetime(2024, 2, 29, 12, 0, 0, 500_000, tzinfo=UTC).replace(tzinfo=None),
            pa.timestamp("us"),
            '"2024-02-29T12:00:00.500000"',
        ),
        (datetime(2024, 2, 29, 12, tzinfo=UTC), pa.timestamp("us", "UTC"), '"2024-02-29T12:00:00.000000Z"'),
        ([0.1, None], pa.list_(pa.float32()), "[0.1,null]"),
        ([[1], []], pa.list_(pa.list_(pa.int32())), "[[1],[]]"),
        ([("a", None), ('"', "é")], pa.map_(pa.string(), pa.string()), '{"a":null,"\\"":"é"}'),
        ({"srid": 4326, "wkb": b"\x01"}, GEOMETRY_TYPE, '{"srid":4326,"wkb":"\\\\x01"}'),
        (None, pa.string(), "null"),
    ],
)
def test_value_has_one_exact_text(value: object, kind: pa.DataType, text: str) -> None:
    assert texts([value], kind) == [text]
    json.loads(text)


def test_number_without_a_bound_has_no_zeros_at_its_end() -> None:
    assert texts([Decimal("1.5"), Decimal("100"), Decimal("0")], UNBOUNDED, -1) == ["1.5", "100", "0"]


@given(st.lists(st.text() | st.none(), min_size=1))
def test_any_text_is_read_back_unchanged(values: list[str | None]) -> None:
    assert [json.loads(text) for text in texts(list(values), pa.string())] == values


def test_rows_have_their_operation_and_nothing_else() -> None:
    table = TableSchema(
        1, TableName("public", 'o"dd'), (Column("k", pa.int32(), 23), Column('v"', pa.string(), 25)), ("k",)
    )
    plain = {"_commit_version": 5, "_xid": 1}
    rows = [
        {"k": 1, 'v"': "a", "_change_type": "insert", "_ordinal": 0, **plain},
        {"k": 1, "_change_type": "update_postimage", "_unchanged": ['v"'], "_ordinal": 1, **plain},
        {"k": 1, "_change_type": "update_postimage", "_exact": [('v"', "infinity")], "_ordinal": 2, **plain},
        {"k": 1, "_change_type": "delete", "_ordinal": 3, **plain},
        {"_change_type": "truncate", "_ordinal": 4, **plain},
    ]
    made = to_envelopes(pa.RecordBatch.from_pylist(rows, schema=change_schema(table)), table)
    assert made.schema == ENVELOPE_SCHEMA
    assert [(row["key"], row["before"], row["after"]) for row in made.to_pylist()] == [
        ('{"k":1}', None, '{"k":1,"v\\"":"a"}'),
        ('{"k":1}', None, '{"k":1}'),
        ('{"k":1}', None, '{"k":1,"v\\"":"infinity"}'),
        ('{"k":1}', '{"k":1}', None),
        (None, None, None),
    ]
    assert set(made["_table"].to_pylist()) == {'public."o""dd"'}


def test_table_without_columns_gives_empty_objects() -> None:
    table = TableSchema(1, TableName("public", "t"), (), ())
    row = {"_change_type": "insert", "_ordinal": 0, "_xid": 1}
    (made,) = to_envelopes(pa.RecordBatch.from_pylist([row], schema=change_schema(table)), table).to_pylist()
    assert (made["key"], made["after"]) == (None, "{}")


def test_a_delete_shows_its_key_or_the_whole_old_row_and_an_old_row_is_nothing_but_before() -> None:
    table = TableSchema(
        1, TableName("public", "t"), (Column("id", pa.string(), 25), Column("note", pa.string(), 25)), ("id",)
    )
    metadata = {"_ordinal": 0, "_xid": 1}
    rows = [
        {"id": "a", "note": None, "_change_type": "delete", "_exact": [("id", "a\ufffd")], **metadata},
        {"id": "a", "note": "x", "_change_type": "delete", **metadata},
        {"id": "a", "note": None, "_change_type": "delete", "_exact": [("note", "exact")], **metadata},
        {"id": "a", "note": None, "_change_type": "update_preimage", **metadata},
    ]
    made = to_envelopes(pa.RecordBatch.from_pylist(rows, schema=change_schema(table)), table).to_pylist()
    assert [(each["before"], each["after"]) for each in made] == [
        ('{"id":"a\ufffd"}', None),
        ('{"id":"a","note":"x"}', None),
        ('{"id":"a","note":"exact"}', None),
        ('{"id":"a","note":null}', None),
    ]
