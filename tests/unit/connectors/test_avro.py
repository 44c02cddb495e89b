"""Arrow schemas as Avro schemas."""

from __future__ import annotations

import json
import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.change import METADATA_FIELDS
from penstock.connectors.schema_registry import EXACT_NAME, avro_name, avro_text
from penstock.errors import ConnectorError
from penstock.schema import TableName

TABLE = TableName("public", "orders")

odd_names = st.text(alphabet="_xX0A5F 1é.", min_size=1, max_size=8)


@given(odd_names)
def test_every_name_becomes_one_that_avro_takes(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", avro_name(name))


@given(odd_names, odd_names)
def test_no_two_names_become_the_same(one: str, other: str) -> None:
    assert (avro_name(one) == avro_name(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("_xA ", "\nx20_"), ("1", "_x_1"), ("a b", "a_x20_b"), ("_x20_", " "), ("_x5F_x", "_x_")],
)
def test_a_name_that_looks_like_an_escape_is_not_taken_for_one(one: str, other: str) -> None:
    assert avro_name(one) != avro_name(other)


@pytest.mark.parametrize("name", ["id", "Order_lines", "_x", "x_1", "_exact"])
def test_a_name_that_fits_stays_as_it_is(name: str) -> None:
    assert avro_name(name) == name


def field(kind: pa.DataType, *, nullable: bool = False) -> object:
    (found,) = json.loads(avro_text(TABLE, pa.schema([pa.field("c", kind, nullable)])))["fields"]
    return found["type"]


@pytest.mark.parametrize(
    ("kind", "avro"),
    [
        (pa.bool_(), "boolean"),
        (pa.int16(), "int"),
        (pa.int32(), "int"),
        (pa.int64(), "long"),
        (pa.uint32(), "long"),
        (pa.float32(), "float"),
        (pa.float64(), "double"),
        (pa.string(), "string"),
        (pa.binary(), "bytes"),
        (pa.date32(), {"type": "int", "logicalType": "date"}),
        (pa.time64("us"), {"type": "long", "logicalType": "time-micros"}),
        (pa.timestamp("us", "UTC"), {"type": "long", "logicalType": "timestamp-micros"}),
        (pa.timestamp("us"), {"type": "long", "logicalType": "local-timestamp-micros"}),
        (pa.decimal128(10, 2), {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}),
        (pa.list_(pa.int64()), {"type": "array", "items": ["null", "long"]}),
        (pa.map_(pa.string(), pa.string()), {"type": "map", "values": ["null", "string"]}),
        (
            pa.struct([pa.field("srid", pa.int32())]),
            {
                "type": "record",
                "name": "orders_c",
                "fields": [{"name": "srid", "type": ["null", "int"], "default": None}],
            },
        ),
    ],
)
def test_every_type_that_a_table_can_have_has_its_avro_type(kind: pa.DataType, avro: object) -> None:
    assert field(kind) == avro
    assert field(kind, nullable=True) == ["null", avro]


def test_a_type_that_avro_lacks_is_named() -> None:
    with pytest.raises(ConnectorError, match="no Avro type"):
        field(pa.map_(pa.int64(), pa.string()))


def test_a_column_with_one_of_our_names_is_kept_too() -> None:
    schema = pa.schema([pa.field("_xid", pa.string()), *METADATA_FIELDS])
    fields = json.loads(avro_text(TABLE, schema))["fields"]
    names = [each["name"] for each in fields]
    assert len(names) == len(set(names))
    assert [each[EXACT_NAME] for each in fields if EXACT_NAME in each] == ["_xid"]


def test_exact_names_are_kept_next_to_escaped_ones() -> None:
    text = avro_text(TableName("odd schema", "läden"), pa.schema([pa.field("1st", pa.int64())]))
    record = json.loads(text)
    assert record[EXACT_NAME] == '"odd schema".läden'
    assert record["fields"][0][EXACT_NAME] == "1st"
