"""TRUNCATE is a change at its position, once for each table that it emptied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fix_captured import Captured, capturing, change
from tests.support.fix_postgres import PostgresServer

pytestmark = pytest.mark.versions(14, 18)


def kinds(captured: Captured, table: str) -> list[str]:
    return [row["_change_type"] for row in captured.rows(table)]


def test_R12_a_truncate_is_between_the_changes_around_it(captured: Captured) -> None:
    captured.execute("CREATE TABLE r12 (id int PRIMARY KEY, note text NOT NULL)")
    with captured.transaction():
        captured.execute("INSERT INTO r12 VALUES (1, 'a')", "TRUNCATE r12", "INSERT INTO r12 VALUES (1, 'b')")
    assert captured.rows("r12") == [
        change("insert", id=1, note="a"),
        change("truncate", id=None, note=None),
        change("insert", id=1, note="b"),
    ]


@pytest.mark.parametrize(
    ("statement", "emptied"),
    [
        ("TRUNCATE {0}_child", "c"),
        ("TRUNCATE {0}_child, {0}_other", "co"),
        ("TRUNCATE {0}_parent CASCADE", "pc"),
        ("TRUNCATE {0}_parent, {0}_other RESTART IDENTITY CASCADE", "pco"),
    ],
    ids=["one", "many", "cascade", "cascade_restart"],
)
def test_R12_every_table_that_was_emptied_says_so(captured: Captured, statement: str, emptied: str) -> None:
    prefix = f"r12_{len(emptied)}_{'cascade' in statement.lower()}".lower()
    tables = {name[0]: f"{prefix}_{name}" for name in ("parent", "child", "other")}
    captured.execute(
        f"CREATE TABLE {tables['p']} (id int PRIMARY KEY GENERATED ALWAYS AS IDENTITY)",
        f"CREATE TABLE {tables['c']} (id int PRIMARY KEY, parent int REFERENCES {tables['p']})",
        f"CREATE TABLE {tables['o']} (id int PRIMARY KEY)",
        f"INSERT INTO {tables['p']} DEFAULT VALUES",
        f"INSERT INTO {tables['c']} VALUES (1, 1)",
        f"INSERT INTO {tables['o']} VALUES (1)",
        statement.format(prefix),
    )
    assert {name for name, table in tables.items() if kinds(captured, table)[-1] == "truncate"} == set(
        emptied
    )
    truncates = [row for name in emptied for row in captured.full_rows(tables[name])[-1:]]
    assert len({row["_commit_version"] for row in truncates}) == 1
    assert sorted(row["_ordinal"] for row in truncates) == list(range(len(emptied)))


PARTITIONED = (
    "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
    "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (10) TO (20)",
    "INSERT INTO parts VALUES (1), (11)",
    "TRUNCATE parts_2",
    "INSERT INTO parts VALUES (12)",
    "TRUNCATE parts",
)


def test_R12_published_by_leaf_each_leaf_is_emptied(captured: Captured) -> None:
    captured.execute(*PARTITIONED)
    assert kinds(captured, "parts_1") == ["insert", "truncate"]
    assert kinds(captured, "parts_2") == ["insert", "truncate", "insert", "truncate"]
    assert captured.rows("parts") == []


def test_R12_published_by_root_the_root_is_truncated_and_a_single_leaf_is_not_reported(
    via_root: Captured,
) -> None:
    via_root.execute(*PARTITIONED)
    # The server leaves the truncate of a single leaf out of such a publication; its documentation says so.
    assert kinds(via_root, "parts") == ["insert", "insert", "insert", "truncate"]
    assert via_root.rows("parts_2") == []


@pytest.fixture
def via_root(postgres_server: PostgresServer, tmp_path: Path) -> Iterator[Captured]:
    with capturing(postgres_server, tmp_path / "spool", "WITH (publish_via_partition_root = true)") as made:
        yield made
