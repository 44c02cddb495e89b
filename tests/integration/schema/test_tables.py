"""Tables renamed, moved, dropped and recreated: identified by OID, named as they were at the time."""

from __future__ import annotations

import pytest

from penstock.schema import TableName
from penstock.spool import SchemaHistory
from tests.support.fix_captured import Captured, change


@pytest.fixture(autouse=True, params=["live", "behind"])
def reading(captured: Captured, request: pytest.FixtureRequest) -> str:
    if request.param == "live":
        captured.start()
    else:
        captured.stop()
    return str(request.param)


def test_S07_a_renamed_table_is_the_same_table_under_its_new_name(captured: Captured, reading: str) -> None:
    old, new = f"s07_old_{reading}", f"s07_new_{reading}"
    captured.execute(f"CREATE TABLE {old} (id int PRIMARY KEY)", f"INSERT INTO {old} VALUES (1)")
    oid = captured.oid(old)
    captured.execute(
        f"ALTER TABLE {old} RENAME TO {new}",
        f"INSERT INTO {new} VALUES (2)",
        f"DELETE FROM {new} WHERE id = 1",
    )
    assert captured.rows(old) == [change("insert", id=1)]
    assert captured.rows(new) == [change("insert", id=2), change("delete", id=1)]
    assert captured.rows(oid) == captured.rows(old) + captured.rows(new)
    assert [schema.key for schema in captured.schemas(oid)] == [("id",), ("id",)]


def test_S07_a_table_moved_to_another_schema_is_the_same_table(captured: Captured, reading: str) -> None:
    table, schema = f"s07_moved_{reading}", f"elsewhere_{reading}"
    captured.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY)",
        f"CREATE SCHEMA {schema}",
        f"INSERT INTO {table} VALUES (1)",
    )
    oid = captured.oid(table)
    captured.execute(f"ALTER TABLE {table} SET SCHEMA {schema}", f"INSERT INTO {schema}.{table} VALUES (2)")
    assert captured.rows(TableName(schema, table)) == [change("insert", id=2)]
    assert captured.rows(oid) == [change("insert", id=1), change("insert", id=2)]


def test_S07_a_dropped_and_recreated_table_is_another_table_of_the_same_name(
    captured: Captured, reading: str
) -> None:
    table = f"s07_again_{reading}"
    captured.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY, note text)", f"INSERT INTO {table} VALUES (1, 'first')"
    )
    first = captured.oid(table)
    captured.execute(
        f"DROP TABLE {table}",
        f"CREATE TABLE {table} (note text PRIMARY KEY)",
        f"INSERT INTO {table} VALUES ('second')",
    )
    second = captured.oid(table)
    assert captured.rows(first) == [change("insert", id=1, note="first")]
    assert captured.rows(second) == [change("insert", note="second")]
    assert captured.rows(table) == captured.rows(first) + captured.rows(second)
    assert [schema.key for schema in captured.schemas(table)] == [("id",), ("note",)]
    history = SchemaHistory.load(captured.spool)
    assert (history.current(first), history.current(second)) == tuple(captured.schemas(table))


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_S06_changes_of_a_table_that_is_gone_by_now_still_have_their_key(
    captured: Captured, reading: str, identity: str
) -> None:
    table = f"s06_gone_{reading}_{identity.lower()}"
    captured.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY, note text)",
        f"ALTER TABLE {table} REPLICA IDENTITY {identity}",
        f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b')",
    )
    captured.drain()
    if reading == "behind":
        captured.stop()
    captured.execute(
        f"UPDATE {table} SET note = 'c' WHERE id = 1",
        f"DELETE FROM {table} WHERE id = 2",
        f"DROP TABLE {table}",
    )
    assert captured.rows(table)[2:] == [
        change("update_postimage", id=1, note="c"),
        change("delete", id=2, note=None),
    ]


def test_S06_two_tables_that_swapped_their_names_are_not_mixed_up(captured: Captured, reading: str) -> None:
    one, two = f"s06_one_{reading}", f"s06_two_{reading}"
    captured.execute(
        f"CREATE TABLE {one} (id int PRIMARY KEY, a int)",
        f"CREATE TABLE {two} (b text PRIMARY KEY)",
        f"INSERT INTO {one} VALUES (1, 1)",
        f"INSERT INTO {two} VALUES ('x')",
    )
    with captured.transaction():
        captured.execute(
            f"ALTER TABLE {one} RENAME TO swap",
            f"ALTER TABLE {two} RENAME TO {one}",
            f"ALTER TABLE swap RENAME TO {two}",
        )
    captured.execute(f"INSERT INTO {one} VALUES ('y')", f"INSERT INTO {two} VALUES (2, 2)")
    assert captured.rows(one) == [change("insert", id=1, a=1), change("insert", b="y")]
    assert captured.rows(two) == [change("insert", b="x"), change("insert", id=2, a=2)]
