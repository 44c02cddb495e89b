"""Unchanged TOAST values: the server does not send them, and they are not NULL."""

from __future__ import annotations

import pytest

from tests.support.fix_captured import Captured, change

# The binaries of 18 that the tests run on lack hstore.
pytestmark = pytest.mark.versions(14, 17)

LONG = "repeat('x', 5000)"

# A type, and an expression for a value of it that is too long for its page. Nothing is compressed: STORAGE
# EXTERNAL.
TOASTED = {
    "text": LONG,
    "varchar": LONG,
    "bpchar": LONG,
    "bytea": f"convert_to({LONG}, 'UTF8')",
    "json": f"json_build_object('k', {LONG})",
    "jsonb": f"jsonb_build_object('k', {LONG})",
    "xml": f"('<a>' || {LONG} || '</a>')::xml",
    "hstore": f"hstore('k', {LONG})",
    "tsvector": "(SELECT array_to_tsvector(array_agg('word' || i)) FROM generate_series(1, 500) i)",
    "numeric": "(repeat('7', 9000))::numeric",
    "bit varying": "(repeat('10', 20000))::bit varying",
    "text[]": f"ARRAY[{LONG}, NULL]",
    "varchar[]": f"ARRAY[{LONG}]::varchar[]",
    "bpchar[]": f"ARRAY[{LONG}]::bpchar[]",
    "date[]": "array_fill('2024-02-29'::date, ARRAY[2000])",
    "int[]": "array_fill(7, ARRAY[2000])",
    "bigint[]": "array_fill(7::bigint, ARRAY[1000])",
    "numeric[]": "array_fill(7.25::numeric, ARRAY[1000])",
    "uuid[]": "array_fill('12345678-1234-5678-1234-567812345678'::uuid, ARRAY[500])",
    "bytea[]": f"ARRAY[convert_to({LONG}, 'UTF8')]",
    "json[]": f"ARRAY[json_build_object('k', {LONG})]",
    "jsonb[]": f"ARRAY[jsonb_build_object('k', {LONG})]",
    "mood[]": "array_fill('happy'::mood, ARRAY[2000])",
    "pair": f"ROW(1, {LONG})::pair",
    "long_text": LONG,
    "int4multirange": "(SELECT range_agg(int4range(i * 10, i * 10 + 5)) FROM generate_series(1, 1000) i)",
}


@pytest.fixture(scope="module", autouse=True)
def user_types(captured: Captured) -> None:
    captured.execute(
        "CREATE EXTENSION hstore",
        "CREATE TYPE mood AS ENUM ('happy', 'sad')",
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE DOMAIN long_text AS text CHECK (length(value) > 10)",
    )


def create_toasted(captured: Captured, table: str) -> list[str]:
    """A table with one column of each type, and a row in it with values stored out of line; gives the
    columns.
    """
    columns = {f"c{at}": kind for at, kind in enumerate(TOASTED)}
    captured.execute(
        f"CREATE TABLE {table} (id int "
        f"PRIMARY KEY, n int, {', '.join(f'{name} {kind}' for name, kind in columns.items())})"
    )
    captured.execute(
        f"ALTER TABLE {table} {', '.join(f'ALTER {name} SET STORAGE EXTERNAL' for name in columns)}"
    )
    captured.execute(f"INSERT INTO {table} VALUES (1, 0, {', '.join(TOASTED.values())})")
    return list(columns)


def test_R07_unchanged_values_of_every_type_are_named_and_not_taken_for_null(captured: Captured) -> None:
    columns = create_toasted(captured, "r07")
    captured.execute(
        "UPDATE r07 SET n = 1", "UPDATE r07 SET c0 = NULL, n = 2", "UPDATE r07 SET c0 = 'short', n = 3"
    )
    inserted, first, second, third = captured.rows("r07")
    assert "_unchanged" not in inserted
    assert [
        name for name in columns if inserted[name] is None and name not in inserted.get("_exact", {})
    ] == []
    assert sorted(first["_unchanged"]) == sorted(columns)
    assert [first[name] for name in columns] == [None] * len(columns)
    assert sorted(second["_unchanged"]) == sorted(columns[1:]), "a value that became NULL did change"
    assert (third["c0"], third["n"]) == ("short", 3)


def test_R08_under_full_identity_the_old_row_gives_the_values(captured: Captured) -> None:
    columns = create_toasted(captured, "r08")
    captured.execute("ALTER TABLE r08 REPLICA IDENTITY FULL", "UPDATE r08 SET n = 1")
    inserted, updated = captured.rows("r08")
    assert "_unchanged" not in updated
    assert {name: updated[name] for name in columns} == {name: inserted[name] for name in columns}
    assert updated.get("_exact") == inserted.get("_exact")


def test_R06_a_key_change_lists_unchanged_columns_and_fills_them_from_the_old_key(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r06t (id int, code text, body text, PRIMARY KEY (id, code))",
        "ALTER TABLE r06t ALTER body SET STORAGE EXTERNAL",
        f"INSERT INTO r06t VALUES (1, repeat('k', 2000), {LONG})",
        "UPDATE r06t SET id = 2",
    )
    _, gone, come = captured.rows("r06t")
    assert gone == change("delete", id=1, code="k" * 2000, body=None)
    assert come == change("insert", id=2, code="k" * 2000, body=None, unchanged=["body"])


def test_R09_an_added_or_dropped_column_leaves_unchanged_values_of_others_alone(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r09 (id int PRIMARY KEY, a text, b text)",
        "ALTER TABLE r09 ALTER a SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL",
        f"INSERT INTO r09 VALUES (1, {LONG}, {LONG})",
        "ALTER TABLE r09 ADD n int DEFAULT 5",
        "UPDATE r09 SET n = 6",
        "ALTER TABLE r09 DROP a",
        "UPDATE r09 SET n = 7",
        "ALTER TABLE r09 RENAME b TO a",
        "UPDATE r09 SET n = 8",
    )
    assert captured.rows("r09")[1:] == [
        change("update_postimage", id=1, a=None, b=None, n=6, unchanged=["a", "b"]),
        change("update_postimage", id=1, b=None, n=7, unchanged=["b"]),
        change("update_postimage", id=1, a=None, n=8, unchanged=["a"]),
    ]


def test_R10_an_unchanged_value_is_never_read_again_from_the_table(captured: Captured) -> None:
    captured.stop()
    captured.execute(
        "CREATE TABLE r10 (id int PRIMARY KEY, n int, body text)",
        "ALTER TABLE r10 ALTER body SET STORAGE EXTERNAL",
        f"INSERT INTO r10 VALUES (1, 0, {LONG})",
        "UPDATE r10 SET n = 1",
        "UPDATE r10 SET body = 'from the future'",
    )
    assert captured.rows("r10")[1:] == [
        change("update_postimage", id=1, n=1, body=None, unchanged=["body"]),
        change("update_postimage", id=1, n=1, body="from the future"),
    ]


def test_R11_each_of_two_updates_in_one_batch_shows_its_change(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r11 (id int PRIMARY KEY, n int, body text)",
        "ALTER TABLE r11 ALTER body SET STORAGE EXTERNAL",
    )
    captured.execute(f"INSERT INTO r11 VALUES (1, 0, {LONG})")
    with captured.transaction():
        captured.execute(
            "UPDATE r11 SET body = repeat('y', 5000)",
            "UPDATE r11 SET n = 1",
            "UPDATE r11 SET n = 2, body = NULL",
        )
    assert captured.rows("r11")[1:] == [
        change("update_postimage", id=1, n=0, body="y" * 5000),
        change("update_postimage", id=1, n=1, body=None, unchanged=["body"]),
        change("update_postimage", id=1, n=2, body=None),
    ]
