"""Columns added, dropped, renamed and retyped between changes."""

from __future__ import annotations

import re
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.spool import SchemaHistory
from tests.support.fix_captured import Captured, change


@pytest.fixture(autouse=True, params=["live", "behind"])
def reading(captured: Captured, request: pytest.FixtureRequest) -> None:
    """Every case holds when the capture follows at once, and when it starts after all changes."""
    if request.param == "live":
        captured.start()
    else:
        captured.stop()


@pytest.fixture
def table(captured: Captured, request: pytest.FixtureRequest) -> str:
    """A table of the test's own, with a row that was captured if the capture is running."""
    name = (
        "t_" + "".join(letter if letter.isalnum() else "_" for letter in request.node.name)[5:].lower()[-55:]
    )
    captured.execute(
        f"CREATE TABLE {name} (id int PRIMARY KEY, a text, b text)",
        f"INSERT INTO {name} VALUES (1, 'a1', 'b1')",
    )
    return name


def names(captured: Captured, table: str) -> list[tuple[str, ...]]:
    return [schema.column_names for schema in captured.schemas(table)]


def test_S01_a_column_added_with_or_without_default_is_present_from_the_next_change_on(
    captured: Captured, table: str
) -> None:
    captured.execute(
        f"ALTER TABLE {table} ADD c int",
        f"UPDATE {table} SET a = 'a2'",
        f"ALTER TABLE {table} ADD d int DEFAULT 7, ADD e text NOT NULL DEFAULT 'x'",
        f"UPDATE {table} SET c = 5",
        f"INSERT INTO {table} (id) VALUES (2)",
        f"DELETE FROM {table}",
    )
    assert captured.rows(table) == [
        change("insert", id=1, a="a1", b="b1"),
        change("update_postimage", id=1, a="a2", b="b1", c=None),
        change("update_postimage", id=1, a="a2", b="b1", c=5, d=7, e="x"),
        change("insert", id=2, a=None, b=None, c=None, d=7, e="x"),
        change("delete", id=1, a=None, b=None, c=None, d=None, e=None),
        change("delete", id=2, a=None, b=None, c=None, d=None, e=None),
    ]


def test_S02_a_column_dropped_and_added_again_has_its_new_type(captured: Captured, table: str) -> None:
    captured.execute(
        f"ALTER TABLE {table} DROP a",
        f"UPDATE {table} SET b = 'b2'",
        f"ALTER TABLE {table} ADD a date DEFAULT '2024-02-29'",
        f"UPDATE {table} SET b = 'b3'",
    )
    assert captured.rows(table) == [
        change("insert", id=1, a="a1", b="b1"),
        change("update_postimage", id=1, b="b2"),
        change("update_postimage", id=1, b="b3", a=date(2024, 2, 29)),
    ]


def test_S03_columns_renamed_and_swapped_keep_their_values_under_the_new_names(
    captured: Captured, table: str
) -> None:
    captured.execute(f"ALTER TABLE {table} RENAME b TO last", f"INSERT INTO {table} VALUES (2, 'a2', 'b2')")
    with captured.transaction():
        captured.execute(
            f"ALTER TABLE {table} RENAME a TO swap",
            f"ALTER TABLE {table} RENAME last TO a",
            f"ALTER TABLE {table} RENAME swap TO last",
        )
    captured.execute(f"INSERT INTO {table} VALUES (3, 'a3', 'b3')")
    assert captured.rows(table) == [
        change("insert", id=1, a="a1", b="b1"),
        change("insert", id=2, a="a2", last="b2"),
        change("insert", id=3, last="a3", a="b3"),
    ]


def test_S03_a_renamed_key_column_is_still_the_key(captured: Captured, table: str) -> None:
    captured.execute(f"ALTER TABLE {table} RENAME id TO number", f"DELETE FROM {table}")
    assert captured.rows(table)[-1] == change("delete", number=1, a=None, b=None)
    assert [schema.key for schema in captured.schemas(table)] == [("id",), ("number",)]


def test_S04_a_change_of_type_or_of_length_and_scale_alone_is_a_new_shape(
    captured: Captured, table: str
) -> None:
    captured.execute(
        f"ALTER TABLE {table} ADD n int, ADD m numeric(6, 2), ADD v varchar(10)",
        f"UPDATE {table} SET n = 1, m = 1.25, v = 'v'",
        f"ALTER TABLE {table} ALTER n TYPE bigint, ALTER m TYPE numeric(12, 3), ALTER v TYPE varchar(20)",
        f"UPDATE {table} SET n = 1099511627776",
        f"ALTER TABLE {table} ALTER n TYPE text USING 'n' || n, ALTER m TYPE int, ALTER v TYPE varchar(5)",
        f"UPDATE {table} SET a = 'end'",
    )
    rows = [(row["n"], row["m"], row["v"]) for row in captured.rows(table)[1:]]
    assert rows == [(1, Decimal("1.25"), "v"), (1 << 40, Decimal("1.250"), "v"), ("n1099511627776", 1, "v")]
    types = [
        tuple(column.arrow_type for column in schema.columns[3:]) for schema in captured.schemas(table)[1:]
    ]
    assert types == [
        (pa.int32(), pa.decimal128(6, 2), pa.string()),
        (pa.int64(), pa.decimal128(12, 3), pa.string()),
        (pa.string(), pa.int32(), pa.string()),
    ]
    lengths = [schema.columns[5].type_modifier for schema in captured.schemas(table)[1:]]
    assert lengths == [14, 24, 9]


def test_S05_of_several_alterations_between_two_changes_the_last_one_counts(
    captured: Captured, table: str
) -> None:
    captured.execute(
        f"ALTER TABLE {table} ADD c int",
        f"ALTER TABLE {table} DROP a",
        f"ALTER TABLE {table} RENAME b TO a",
        f"ALTER TABLE {table} ALTER c TYPE text",
        f"UPDATE {table} SET c = 'c2'",
    )
    assert captured.rows(table)[1:] == [change("update_postimage", id=1, a="b1", c="c2")]
    assert names(captured, table) == [("id", "a", "b"), ("id", "a", "c")]


def test_S05_alterations_and_changes_of_one_transaction_each_have_their_shape(
    captured: Captured, table: str
) -> None:
    with captured.transaction():
        captured.execute(
            f"UPDATE {table} SET a = 'before'",
            f"ALTER TABLE {table} ADD c int DEFAULT 3",
            f"UPDATE {table} SET a = 'between'",
            f"ALTER TABLE {table} DROP b",
            f"INSERT INTO {table} VALUES (2, 'after', 4)",
        )
    assert captured.rows(table)[1:] == [
        change("update_postimage", id=1, a="before", b="b1"),
        change("update_postimage", id=1, a="between", b="b1", c=3),
        change("insert", id=2, a="after", c=4),
    ]


def test_S05_an_alteration_that_was_rolled_back_never_was(captured: Captured, table: str) -> None:
    with captured.database.connect() as connection:
        connection.execute(f"ALTER TABLE {table} ADD lost int".encode())
        connection.execute(f"INSERT INTO {table} VALUES (2, 'lost', NULL, 1)".encode())
        connection.rollback()
    with captured.transaction():
        captured.execute(
            f"INSERT INTO {table} VALUES (3, 'kept', NULL)",
            "SAVEPOINT s",
            f"ALTER TABLE {table} DROP b",
            f"INSERT INTO {table} VALUES (4, 'lost')",
            "ROLLBACK TO s",
            f"INSERT INTO {table} VALUES (5, 'kept', 'b5')",
        )
    assert captured.rows(table)[1:] == [
        change("insert", id=3, a="kept", b=None),
        change("insert", id=5, a="kept", b="b5"),
    ]
    assert names(captured, table) == [("id", "a", "b")]


def test_S10_defaults_and_nullability_alone_change_neither_data_nor_shape(
    captured: Captured, table: str
) -> None:
    captured.execute(
        f"ALTER TABLE {table} ALTER a SET DEFAULT 'from now on', ALTER b SET NOT NULL",
        f"UPDATE {table} SET b = 'b2'",
        f"INSERT INTO {table} (id, b) VALUES (2, 'b2')",
        f"ALTER TABLE {table} ALTER a DROP DEFAULT, ALTER b DROP NOT NULL",
        f"INSERT INTO {table} (id) VALUES (3)",
    )
    assert captured.rows(table)[1:] == [
        change("update_postimage", id=1, a="a1", b="b2"),
        change("insert", id=2, a="from now on", b="b2"),
        change("insert", id=3, a=None, b=None),
    ]
    assert len(captured.schemas(table)) == 1


def test_S06_the_history_knows_every_shape_by_the_position_of_its_first_change(
    captured: Captured, table: str
) -> None:
    captured.execute(
        f"ALTER TABLE {table} ADD c int",
        f"UPDATE {table} SET c = 1",
        f"ALTER TABLE {table} DROP a",
        f"UPDATE {table} SET c = 2",
    )
    rows = captured.full_rows(table)
    history = SchemaHistory.load(captured.spool)
    oid = captured.oid(table)
    assert [version.position.value for version in history.versions(oid)] == [
        row["_commit_version"] for row in rows
    ]
    assert [version.schema for version in history.versions(oid)] == captured.schemas(table)
    for version in history.versions(oid):
        assert history.at(oid, version.position) == version.schema


def test_the_page_about_changes_shows_how_to_read_the_history(
    captured: Captured, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    captured.execute(f"ALTER TABLE {table} ADD c int", f"DELETE FROM {table}")
    captured.drain()
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "changes.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {"spool": captured.spool, "oid": captured.oid(table)})  # noqa: S102 - our own page
    shown = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["('id', 'a', 'b') ('id',)", "('id', 'a', 'b', 'c') ('id',)"]
