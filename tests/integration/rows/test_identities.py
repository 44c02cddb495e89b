"""The old row in a change, by replica identity."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.fix_captured import Captured, capturing, change
from tests.support.fix_postgres import PostgresServer

pytestmark = pytest.mark.versions(14, 18)


def key_of(captured: Captured, table: str) -> tuple[str, ...]:
    return captured.schemas(table)[-1].key


def test_R01_under_the_default_identity_a_delete_shows_its_key_alone(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r01 (id int PRIMARY KEY, note text NOT NULL)",
        "INSERT INTO r01 VALUES (1, 'a')",
        "UPDATE r01 SET note = 'b'",
        "DELETE FROM r01",
    )
    assert captured.rows("r01") == [
        change("insert", id=1, note="a"),
        change("update_postimage", id=1, note="b"),
        change("delete", id=1, note=None),
    ]


def test_R02_under_full_identity_the_key_is_the_primary_key_and_not_every_column(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r02 (note text, id int PRIMARY KEY, more int)",
        "ALTER TABLE r02 REPLICA IDENTITY FULL",
        "INSERT INTO r02 VALUES ('a', 1, NULL)",
        "UPDATE r02 SET note = 'b'",
        "UPDATE r02 SET id = 2, more = 5",
        "DELETE FROM r02",
    )
    assert captured.rows("r02") == [
        change("insert", note="a", id=1, more=None),
        change("update_postimage", note="b", id=1, more=None),
        change("delete", note=None, id=1, more=None),
        change("insert", note="b", id=2, more=5),
        change("delete", note=None, id=2, more=None),
    ]
    assert key_of(captured, "r02") == ("id",)


def test_R03_under_an_index_identity_its_columns_are_the_key_until_it_is_dropped(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r03 (id int PRIMARY KEY, code text NOT NULL, site int NOT NULL, note text)",
        "CREATE UNIQUE INDEX r03_code ON r03 (site, code)",
        "ALTER TABLE r03 REPLICA IDENTITY USING INDEX r03_code",
        "INSERT INTO r03 VALUES (1, 'a', 7, 'x')",
        "UPDATE r03 SET note = 'y'",
        "UPDATE r03 SET code = 'b'",
    )
    assert captured.rows("r03") == [
        change("insert", id=1, code="a", site=7, note="x"),
        change("update_postimage", id=1, code="a", site=7, note="y"),
        change("delete", id=None, code="a", site=7, note=None),
        change("insert", id=1, code="b", site=7, note="y"),
    ]
    assert key_of(captured, "r03") == ("code", "site")
    captured.execute("DROP INDEX r03_code", "INSERT INTO r03 VALUES (2, 'c', 7, 'z')")
    assert captured.rows("r03")[-1] == change("insert", id=2, code="c", site=7, note="z")
    assert key_of(captured, "r03") == ()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="replica identity"):
        captured.execute("DELETE FROM r03")


@pytest.mark.parametrize("identity", ["NOTHING", "DEFAULT"])
def test_R04_rows_that_nothing_tells_apart_come_as_inserts_without_a_key(
    captured: Captured, identity: str
) -> None:
    table = f"r04_{identity.lower()}"
    captured.execute(
        f"CREATE TABLE {table} (id int)",
        f"ALTER TABLE {table} REPLICA IDENTITY {identity}",
        f"INSERT INTO {table} VALUES (1), (1)",
    )
    assert captured.rows(table) == [change("insert", id=1)] * 2
    assert key_of(captured, table) == ()


def test_R05_each_of_several_equal_rows_can_be_replaced_alone(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r05 (a int, b text)",
        "ALTER TABLE r05 REPLICA IDENTITY FULL",
        "INSERT INTO r05 VALUES (1, 'x'), (1, 'x'), (1, 'x'), (2, NULL)",
        "UPDATE r05 SET b = 'y' WHERE ctid = (SELECT min(ctid) FROM r05 WHERE a = 1)",
        "DELETE FROM r05 WHERE ctid = (SELECT min(ctid) FROM r05 WHERE b = 'x')",
        "UPDATE r05 SET a = 3 WHERE a = 2",
    )
    rows = captured.rows("r05")
    assert rows[4:] == [
        change("delete", a=1, b="x"),
        change("insert", a=1, b="y"),
        change("delete", a=1, b="x"),
        change("delete", a=2, b=None),
        change("insert", a=3, b=None),
    ]
    assert key_of(captured, "r05") == ()
    # A sink with whole rows only: one added for each insert, one removed for each delete.
    left: list[tuple[object, object]] = []
    for row in rows:
        place = (row["a"], row["b"])
        if row["_change_type"] == "insert":
            left.append(place)
        else:
            left.remove(place)
    assert sorted(left, key=str) == sorted(captured.query("SELECT a, b FROM r05"), key=str)


def test_R06_a_change_of_part_of_a_composite_key_is_a_delete_and_an_insert(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r06 (note text, b text, a int, PRIMARY KEY (a, b))",
        "INSERT INTO r06 VALUES ('n', 'x', 1), ('m', 'x', 2)",
        "UPDATE r06 SET b = 'y' WHERE a = 1",
        "UPDATE r06 SET a = a + 10",
        "UPDATE r06 SET a = a",
    )
    assert captured.rows("r06")[2:] == [
        change("delete", note=None, b="x", a=1),
        change("insert", note="n", b="y", a=1),
        change("delete", note=None, b="x", a=2),
        change("insert", note="m", b="x", a=12),
        change("delete", note=None, b="y", a=1),
        change("insert", note="n", b="y", a=11),
        change("update_postimage", note="m", b="x", a=12),
        change("update_postimage", note="n", b="y", a=11),
    ]
    assert key_of(captured, "r06") == ("b", "a")


def test_R13_a_delete_leaves_columns_null_that_are_not_null_in_the_source(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r13 (id int "
        "PRIMARY KEY, n int NOT NULL, t text NOT NULL, at timestamptz NOT NULL, raw bytea NOT NULL)",
        "INSERT INTO r13 VALUES (1, 0, '', 'epoch', '')",
        "DELETE FROM r13",
    )
    assert captured.rows("r13")[1] == change("delete", id=1, n=None, t=None, at=None, raw=None)


def test_R14_an_update_that_changes_nothing_is_still_a_change(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE r14 (id int PRIMARY KEY, note text)",
        "INSERT INTO r14 VALUES (1, 'a')",
        "UPDATE r14 SET note = note",
        "UPDATE r14 SET id = id",
        "ALTER TABLE r14 REPLICA IDENTITY FULL",
        "UPDATE r14 SET note = note",
    )
    assert captured.rows("r14")[1:] == [change("update_postimage", id=1, note="a")] * 3


@pytest.fixture
def via_root(postgres_server: PostgresServer, tmp_path: Path) -> Iterator[Captured]:
    with capturing(postgres_server, tmp_path / "spool", "WITH (publish_via_partition_root = true)") as made:
        yield made


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_a_null_in_a_whole_old_row_is_a_value_whatever_the_root_announces(
    via_root: Captured, identity: str
) -> None:
    """The server marks an old row by the identity of the root: as a key where only the partitions have
    FULL.
    """
    via_root.execute(
        "CREATE TABLE parted (id int, note text) PARTITION BY LIST (id)",
        "CREATE TABLE parted_1 PARTITION OF parted DEFAULT",
        f"ALTER TABLE parted REPLICA IDENTITY {identity}; ALTER TABLE parted_1 REPLICA IDENTITY FULL",
        "INSERT INTO parted VALUES (1, NULL), (2, NULL)",
        "UPDATE parted SET note = 'two' WHERE id = 2",
        "DELETE FROM parted",
    )
    assert via_root.rows("parted")[2:] == [
        change("delete", id=2, note=None),
        change("insert", id=2, note="two"),
        change("delete", id=1, note=None),
        change("delete", id=2, note="two"),
    ]
    assert sum(each.file.counts.unidentified for each in via_root.slices("parted")) == 0
