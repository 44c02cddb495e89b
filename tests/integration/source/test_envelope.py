"""Several tables in one stream: envelopes, with rows as JSON."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from pyspark.sql import Row

from penstock.spark.options import SNAPSHOT
from tests.support.source.stream import ChangeSource

ODD = """
CREATE TABLE odd (
    id bigint PRIMARY KEY, n numeric, m numeric(12,2), f float4, raw bytea, at timestamptz, plain timestamp,
      day date,
    doc jsonb, list int[], words text, long text
);
ALTER TABLE odd ALTER long SET STORAGE EXTERNAL;
"""
VALUES = """(9007199254740993, 1.50, 12.50, 0.1, '\\x00ff', '2024-02-29 12:00:00.5+02', '2024-02-29 12:00:00',
 'infinity', '{"a": "\\u00e9"}', '{1,NULL}', %s, repeat('x', 9000))"""
AFTER = {
    "id": 9007199254740993,
    "n": Decimal("1.5"),
    "m": Decimal("12.50"),
    "f": Decimal("0.1"),
    "raw": "\\x00ff",
    "at": "2024-02-29T10:00:00.500000Z",
    "plain": "2024-02-29T12:00:00.000000",
    "day": "infinity",
    "doc": '{"a": "é"}',
    "list": [1, None],
    "words": 'q"\\\n',
    "long": "x" * 9000,
}


def exactly(text: str) -> dict[str, object]:
    return dict(json.loads(text, parse_float=Decimal))


def of(rows: list[Row], table: str) -> list[Row]:
    return sorted(
        (row for row in rows if row["_table"] == table),
        key=lambda row: (row["_commit_version"], row["_ordinal"]),
    )


@pytest.mark.source
@pytest.mark.newest
def test_tables_share_a_stream_as_exact_json_with_their_snapshot_first_under_any_schema_change(
    source: ChangeSource,
) -> None:
    execute = source.database.execute
    execute(ODD)
    execute("CREATE TABLE keyless (a int, b text)")
    execute("ALTER TABLE keyless REPLICA IDENTITY FULL")
    execute("CREATE TABLE aside (id int PRIMARY KEY)")
    source.insert(1, 2)
    execute(f"INSERT INTO odd VALUES {VALUES}", 'q"\\\n')
    execute("INSERT INTO aside VALUES (1)")
    run = source.start(
        table="", tables="public.o*, public.keyless", startingPosition=SNAPSHOT, consumer="many"
    )
    found = run.wait_for_rows(3)
    assert {row["_change_type"] for row in found} == {"snapshot"}
    assert [(row["key"], row["before"]) for row in of(found, "public.orders")] == [
        ('{"id":1}', None),
        ('{"id":2}', None),
    ]
    (odd,) = of(found, "public.odd")
    assert exactly(odd["after"]) == AFTER
    with source.database.transaction():
        execute("UPDATE odd SET n = 2")  # the long value does not travel
        execute("DELETE FROM orders WHERE id = 1")
        execute("INSERT INTO keyless VALUES (1, 'x')")
        execute("DELETE FROM keyless")
        execute("INSERT INTO aside VALUES (2)")
    execute("ALTER TABLE orders ADD more int")
    execute("INSERT INTO orders VALUES (7, NULL, 8)")
    execute("TRUNCATE orders")
    rows = run.wait_for_rows(9)[3:]
    (kept,) = of(rows, "public.odd")
    assert kept["_unchanged"] == ["long"]
    assert exactly(kept["after"]) == {name: value for name, value in AFTER.items() if name != "long"} | {
        "n": 2
    }
    gone, wider, emptied = of(rows, "public.orders")
    assert (gone["_change_type"], gone["key"], gone["before"], gone["after"]) == (
        "delete",
        '{"id":1}',
        '{"id":1}',
        None,
    )
    assert (wider["_change_type"], wider["after"]) == ("insert", '{"id":7,"note":null,"more":8}')
    assert (emptied["_change_type"], emptied["key"], emptied["before"], emptied["after"]) == (
        "truncate",
        None,
        None,
        None,
    )
    born, died = of(rows, "public.keyless")
    assert (born["key"], born["after"], died["before"]) == (None, '{"a":1,"b":"x"}', '{"a":1,"b":"x"}')
    assert of(rows, "public.aside") == []
    assert all(row["_commit_timestamp"] is not None and row["_xid"] > 0 for row in rows)


def test_N15_partitioned_table_is_read_once_under_the_name_of_its_root(source: ChangeSource) -> None:
    execute = source.database.execute
    execute("CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    execute("CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (10)")
    execute("CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (10) TO (20)")
    execute("INSERT INTO parts VALUES (1), (11)")
    run = source.start(
        table="",
        tables="public.parts*",
        startingPosition=SNAPSHOT,
        slot=f"{source.slot}_parts",
        publication="",
    )
    assert {(row["_table"], row["key"]) for row in run.wait_for_rows(2)} == {
        ("public.parts", '{"id":1}'),
        ("public.parts", '{"id":11}'),
    }
    execute("INSERT INTO parts VALUES (2), (12)")
    assert {(row["_table"], row["_change_type"]) for row in run.wait_for_rows(4)[2:]} == {
        ("public.parts", "insert")
    }


def test_without_any_name_the_publication_says_which_tables_there_are(source: ChangeSource) -> None:
    source.database.execute("CREATE TABLE aside (id int PRIMARY KEY)")
    source.database.execute("INSERT INTO aside VALUES (1)")
    source.insert(1, 1)
    run = source.start(table="", startingPosition=SNAPSHOT)
    assert [row["_table"] for row in run.wait_for_rows(1)] == ["public.orders"]
