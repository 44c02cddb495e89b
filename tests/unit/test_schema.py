from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.schema import Column, TableName, TableSchema

identifiers = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=63
)


@pytest.mark.parametrize(
    ("text", "schema", "name"),
    [
        ("public.orders", "public", "orders"),
        ("Public.Orders", "Public", "Orders"),
        ('"public"."orders"', "public", "orders"),
        ('public."or.ders"', "public", "or.ders"),
        ('"a""b".c', 'a"b', "c"),
        ("über.größe", "über", "größe"),
        ('public."order lines"', "public", "order lines"),
        ('" a "." "', " a ", " "),
    ],
)
def test_table_name_is_read_as_the_catalog_has_it(text: str, schema: str, name: str) -> None:
    assert TableName.parse(text) == TableName(schema, name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "orders",
        "public.",
        ".orders",
        "a.b.c",
        "a.b.",
        '"a.b',
        '""."b"',
        'a."b"c',
        'a"b.c',
        "a. b",
        "a.b ",
        "a.b c",
        "a.b\n",
    ],
)
def test_table_name_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"schema\.table"):
        TableName.parse(text)


@given(identifiers, identifiers)
@example('"', '""')
@example(".", "a.b")
@example(" ", "a ")
@example("a\t", "a\n")
@example("\u2003a", "a\u2003")
def test_table_name_text_round_trip(schema: str, name: str) -> None:
    table = TableName(schema, name)
    assert TableName.parse(str(table)) == table


@given(identifiers, identifiers, identifiers, identifiers)
def test_different_tables_never_print_alike(
    schema: str, name: str, other_schema: str, other_name: str
) -> None:
    one, other = TableName(schema, name), TableName(other_schema, other_name)
    assert (str(one) == str(other)) == (one == other)


def test_plain_names_print_plainly() -> None:
    assert str(TableName("public", "orders")) == "public.orders"
    assert str(TableName("public", "or.ders")) == 'public."or.ders"'


def test_table_schema_is_a_value() -> None:
    columns = (Column("id", pa.int64(), 20), Column("note", pa.string(), 25))
    table = TableSchema(16400, TableName("public", "orders"), columns, ("id",))
    assert table.column_names == ("id", "note")
    assert pickle.loads(pickle.dumps(table)) == table
    assert table == TableSchema(16400, TableName("public", "orders"), columns, ("id",))
