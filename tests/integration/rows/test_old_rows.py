"""Old rows of updates and deletes, for readers that ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fix_captured import Captured, change
from tests.support.fix_postgres import PostgresServer
from tests.support.waiting import wait_for

pytestmark = pytest.mark.versions(14, 18)


@pytest.fixture
def asked(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    database = postgres_server.create_database()
    made = Captured(database, tmp_path_factory.mktemp("asked") / "spool", old_rows=True)
    yield made
    made.close()
    database.close()
    postgres_server.drop_database(database.name)


def test_R02_under_full_identity_the_whole_old_row_precedes_every_change(asked: Captured) -> None:
    asked.execute(
        "CREATE TABLE r02 (note text, id int PRIMARY KEY, size numeric)",
        "ALTER TABLE r02 REPLICA IDENTITY FULL",
        "ALTER TABLE r02 ALTER note SET STORAGE EXTERNAL",
        "INSERT INTO r02 VALUES (repeat('a', 4000), 1, 'NaN')",
        "UPDATE r02 SET size = 2",
        "UPDATE r02 SET id = 2, note = 'b'",
        "DELETE FROM r02",
    )
    long = "a" * 4000
    exact = {"_exact": {"size": "NaN"}}
    assert asked.rows_with_old("r02") == [
        change("insert", note=long, id=1, size=None) | exact,
        change("update_preimage", note=long, id=1, size=None) | exact,
        change("update_postimage", note=long, id=1, size=2),
        change("delete", note=long, id=1, size=2),
        change("insert", note="b", id=2, size=2),
        change("delete", note="b", id=2, size=2),
    ]
    assert [row["_change_type"] for row in asked.rows("r02")] == [
        "insert",
        "update_postimage",
        "delete",
        "insert",
        "delete",
    ]


def test_R01_under_other_identities_there_is_no_old_row(asked: Captured) -> None:
    asked.execute(
        "CREATE TABLE r01 (id int PRIMARY KEY, note text)",
        "INSERT INTO r01 VALUES (1, 'a')",
        "UPDATE r01 SET note = 'b'",
        "UPDATE r01 SET id = 2",
        "DELETE FROM r01",
    )
    assert asked.rows_with_old("r01") == [
        change("insert", id=1, note="a"),
        change("update_postimage", id=1, note="b"),
        change("delete", id=1, note=None),
        change("insert", id=2, note="b"),
        change("delete", id=2, note=None),
    ]


def test_X02_a_transaction_in_pieces_has_the_old_rows_that_were_not_rolled_back(asked: Captured) -> None:
    asked.execute("CREATE TABLE x02 (id int PRIMARY KEY, n int)", "ALTER TABLE x02 REPLICA IDENTITY FULL")
    asked.execute("INSERT INTO x02 SELECT g, 0 FROM generate_series(1, 60000) g")
    with asked.transaction():
        asked.execute(
            "UPDATE x02 SET n = 1", "SAVEPOINT s", "UPDATE x02 SET n = 2 WHERE id <= 30000", "ROLLBACK TO s"
        )
        asked.execute("UPDATE x02 SET n = 3 WHERE id = 60000")
    wait_for(lambda: len(asked.slices("x02", old=True)) > len(asked.slices("x02")), "old rows")
    rows = asked.rows_with_old("x02")[60000:]
    assert [(row["_change_type"], row["id"], row["n"]) for row in rows[-2:]] == [
        ("update_preimage", 60000, 1),
        ("update_postimage", 60000, 3),
    ]
    assert len(rows) == 2 * 60001
    assert {(row["_change_type"], row["n"]) for row in rows[:-2]} == {
        ("update_preimage", 0),
        ("update_postimage", 1),
    }
    counts = [each.file.counts for each in asked.slices("x02", old=True) if each.file.is_old]
    assert sum(each.preimages for each in counts) == sum(each.rows for each in counts) == 60001
