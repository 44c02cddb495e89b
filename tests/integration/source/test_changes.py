"""The columns of a row in the stream."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest

from tests.support.source.stream import ChangeSource

pytestmark = pytest.mark.source

WIDE = """
CREATE TABLE wide (
    id int PRIMARY KEY, amount numeric(12,2), at timestamptz, day date, raw bytea, doc jsonb, uid uuid,
      ok boolean, long text
);
ALTER TABLE wide ALTER long SET STORAGE EXTERNAL;
"""
FULL = (
    "INSERT INTO wide VALUES (1, 12.50, '2024-02-29 12:00:00.123456+02', '2024-02-29', '\\x00ff', "
    "'{\"a\": [1]}', %s, true, %s)"
)
UUID = "123e4567-e89b-12d3-a456-426614174000"


def test_changes_arrive_in_order_with_their_operation(source: ChangeSource) -> None:
    execute = source.database.execute
    run = source.start()
    execute("INSERT INTO orders VALUES (1, 'a'), (2, NULL)")
    execute("UPDATE orders SET note = 'b' WHERE id = 1")
    execute("UPDATE orders SET id = 3 WHERE id = 2")
    execute("DELETE FROM orders WHERE id = 1")
    execute("TRUNCATE orders")
    rows = run.wait_for_rows(7)
    assert [(row["_change_type"], row["id"], row["note"]) for row in rows] == [
        ("insert", 1, "a"),
        ("insert", 2, None),
        ("update_postimage", 1, "b"),
        ("delete", 2, None),
        ("insert", 3, None),
        ("delete", 1, None),
        ("truncate", None, None),
    ]
    places = [(row["_commit_version"], row["_ordinal"]) for row in rows]
    assert places == sorted(set(places))
    assert len({row["_commit_version"] for row in rows}) == 5
    assert len({row["_xid"] for row in rows}) == 5
    assert all(
        row["_commit_timestamp"] is not None and row["_unchanged"] is None and row["_exact"] is None
        for row in rows
    )


def test_R02_old_rows_are_in_the_stream_of_those_who_ask_for_them(source: ChangeSource) -> None:
    execute = source.database.execute
    execute("ALTER TABLE orders REPLICA IDENTITY FULL")
    run = source.start(oldRows="true")
    execute("INSERT INTO orders VALUES (1, 'a')")
    execute("UPDATE orders SET note = 'b'")
    execute("DELETE FROM orders")
    rows = sorted(run.wait_for_rows(4), key=lambda row: (row["_commit_version"], row["_ordinal"]))
    assert [(row["_change_type"], row["id"], row["note"]) for row in rows] == [
        ("insert", 1, "a"),
        ("update_preimage", 1, "a"),
        ("update_postimage", 1, "b"),
        ("delete", 1, "b"),
    ]


def test_values_have_the_types_of_their_columns(source: ChangeSource) -> None:
    source.database.execute(WIDE)
    source.database.execute(f"ALTER PUBLICATION {source.slot} ADD TABLE wide")
    run = source.start(table="public.wide")
    source.database.execute(FULL, UUID, "short")
    source.database.execute("INSERT INTO wide (id) VALUES (2)")
    full, empty = run.wait_for_rows(2)
    # Spark hands timestamps over in the zone of this machine, without saying so.
    at = full["at"].astimezone(UTC)
    assert (full["amount"], at, full["day"]) == (
        Decimal("12.50"),
        datetime(2024, 2, 29, 10, 0, 0, 123456, tzinfo=UTC),
        date(2024, 2, 29),
    )
    assert (bytes(full["raw"]), json.loads(full["doc"]), full["uid"], full["ok"]) == (
        b"\x00\xff",
        {"a": [1]},
        UUID,
        True,
    )
    assert [empty[name] for name in ("amount", "at", "day", "raw", "doc", "uid", "ok", "long")] == [None] * 8


def test_unchanged_toast_is_named_and_is_not_a_null_of_the_source(source: ChangeSource) -> None:
    source.database.execute(WIDE)
    source.database.execute(f"ALTER PUBLICATION {source.slot} ADD TABLE wide")
    source.database.execute(FULL, UUID, "x" * 10_000)
    source.database.execute("UPDATE wide SET ok = false")
    source.database.execute("UPDATE wide SET long = NULL")
    inserted, kept, cleared = source.start(table="public.wide").wait_for_rows(3)
    assert (inserted["long"], inserted["_unchanged"]) == ("x" * 10_000, None)
    assert (kept["long"], kept["_unchanged"]) == (None, ["long"])
    assert (cleared["long"], cleared["_unchanged"]) == (None, None)


def test_value_beyond_its_column_is_also_given_as_text(source: ChangeSource) -> None:
    source.database.execute("CREATE TABLE odd (id int PRIMARY KEY, n numeric(12,2), day date)")
    source.database.execute(f"ALTER PUBLICATION {source.slot} ADD TABLE odd")
    source.database.execute("INSERT INTO odd VALUES (1, 'NaN', 'infinity')")
    (row,) = source.start(table="public.odd").wait_for_rows(1)
    assert (row["n"], row["day"], row["_exact"]) == (None, None, {"n": "NaN", "day": "infinity"})


def test_only_the_requested_table_is_in_the_stream(source: ChangeSource) -> None:
    source.database.execute("CREATE TABLE other (id int PRIMARY KEY)")
    source.database.execute(f"ALTER PUBLICATION {source.slot} ADD TABLE other")
    with source.database.transaction():
        source.database.execute("INSERT INTO other VALUES (7)")
        source.database.execute("INSERT INTO orders VALUES (1, 'mine')")
    assert [row["note"] for row in source.start().wait_for_rows(1)] == ["mine"]


def test_table_with_a_name_that_needs_quotes(source: ChangeSource) -> None:
    source.database.execute('CREATE TABLE "Odd, ""T"".x" ("the id" int PRIMARY KEY, "ünï, code" text)')
    source.drop_slot()
    source.database.execute(f"DROP PUBLICATION {source.slot}")
    run = source.start(table='public."Odd, ""T"".x"')
    source.wait_for_active_slot()
    source.database.execute('INSERT INTO "Odd, ""T"".x" VALUES (1, \'é\')')
    (row,) = run.wait_for_rows(1)
    assert (row["the id"], row["ünï, code"]) == (1, "é")
