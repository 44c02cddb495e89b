"""Keys added, dropped and changed, under every replica identity, without a restart of the capture."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.capture.slot_capture import KeyCatalog
from tests.support.fix_captured import Captured, capturing, change
from tests.support.fix_postgres import PostgresServer
from tests.support.waiting import wait_for

pytestmark = pytest.mark.versions(14, 18)


def keys(captured: Captured, table: str) -> list[tuple[str, ...]]:
    return [schema.key for schema in captured.schemas(table)]


def test_S09_a_key_added_dropped_and_put_on_other_columns_is_followed(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE s09 (a int NOT NULL, b int NOT NULL, c int)",
        "INSERT INTO s09 VALUES (1, 1, 1)",
        "ALTER TABLE s09 ADD CONSTRAINT s09_key PRIMARY KEY (a)",
        "UPDATE s09 SET c = 2",
        "ALTER TABLE s09 DROP CONSTRAINT s09_key, ADD CONSTRAINT s09_key PRIMARY KEY (b, a)",
        "UPDATE s09 SET c = 3",
        "UPDATE s09 SET b = 2",
        "ALTER TABLE s09 DROP CONSTRAINT s09_key",
        "INSERT INTO s09 VALUES (1, 2, 5)",
    )
    assert captured.rows("s09") == [
        change("insert", a=1, b=1, c=1),
        change("update_postimage", a=1, b=1, c=2),
        change("update_postimage", a=1, b=1, c=3),
        change("delete", a=1, b=1, c=None),
        change("insert", a=1, b=2, c=3),
        change("insert", a=1, b=2, c=5),
    ]
    assert keys(captured, "s09") == [(), ("a",), ("a", "b"), ()]


def test_S09_the_key_is_in_table_order_whatever_the_order_in_the_index(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE s09_order (x text, b int, a int, y text, PRIMARY KEY (a, y, b))",
        "INSERT INTO s09_order VALUES ('x', 1, 2, 'y')",
        "DELETE FROM s09_order",
    )
    assert keys(captured, "s09_order") == [("b", "a", "y")]
    assert captured.rows("s09_order")[1] == change("delete", x=None, b=1, a=2, y="y")


def test_S09_under_full_identity_a_key_that_changes_is_seen_without_a_restart(captured: Captured) -> None:
    captured.start()
    captured.execute(
        "CREATE TABLE s09_full (a int NOT NULL, b int NOT NULL, c int)",
        "ALTER TABLE s09_full REPLICA IDENTITY FULL",
        "INSERT INTO s09_full VALUES (1, 1, 1)",
        "UPDATE s09_full SET c = 2",
    )
    captured.drain()
    captured.execute(
        "ALTER TABLE s09_full ADD CONSTRAINT s09_full_key PRIMARY KEY (a)", "UPDATE s09_full SET c = 3"
    )
    captured.drain()
    captured.execute("UPDATE s09_full SET c = 4")
    captured.drain()
    captured.execute(
        "ALTER TABLE s09_full DROP CONSTRAINT s09_full_key, ADD CONSTRAINT s09_full_key PRIMARY KEY (b)"
    )
    captured.execute("UPDATE s09_full SET a = 2")
    captured.drain()
    captured.execute("UPDATE s09_full SET a = 3", "UPDATE s09_full SET b = 2")
    captured.drain()
    captured.execute("ALTER TABLE s09_full RENAME b TO k", "UPDATE s09_full SET c = 5")
    captured.drain()
    captured.execute("UPDATE s09_full SET c = 6")
    captured.drain()
    captured.execute("ALTER TABLE s09_full DROP CONSTRAINT s09_full_key", "DELETE FROM s09_full")
    assert captured.rows("s09_full") == [
        change("insert", a=1, b=1, c=1),
        change("delete", a=1, b=1, c=1),
        change("insert", a=1, b=1, c=2),
        # The first change after each new key is two whole rows: the catalog tells that the key has changed,
        # and not where.
        change("delete", a=1, b=1, c=2),
        change("insert", a=1, b=1, c=3),
        change("update_postimage", a=1, b=1, c=4),
        change("delete", a=1, b=1, c=4),
        change("insert", a=2, b=1, c=4),
        change("update_postimage", a=3, b=1, c=4),
        change("delete", a=None, b=1, c=None),
        change("insert", a=3, b=2, c=4),
        change("delete", a=3, k=2, c=4),
        change("insert", a=3, k=2, c=5),
        change("update_postimage", a=3, k=2, c=6),
        change("delete", a=3, k=2, c=6),
    ]
    assert keys(captured, "s09_full") == [(), ("a",), (), ("b",), (), ("k",), ()]


@pytest.mark.parametrize("end", ["stays", "goes"])
def test_S06_under_full_identity_a_key_added_while_no_capture_ran_holds_only_from_its_creation(
    captured: Captured, end: str
) -> None:
    table = f"s06_full_{end}"
    captured.execute(
        f"CREATE TABLE {table} (a int PRIMARY KEY, b int NOT NULL, c int)",
        f"ALTER TABLE {table} REPLICA IDENTITY FULL",
        f"INSERT INTO {table} VALUES (1, 1, 1)",
    )
    captured.drain()
    captured.stop()
    captured.execute(
        f"UPDATE {table} SET c = 2",
        f"UPDATE {table} SET b = 5",
        f"ALTER TABLE {table} DROP CONSTRAINT {table}_pkey, ADD CONSTRAINT {table}_pkey PRIMARY KEY (b)",
        f"UPDATE {table} SET a = 9",
        f"DELETE FROM {table}",
    )
    if end == "goes":
        captured.execute(f"DROP TABLE {table}")
    rows = captured.rows(table)
    if end == "goes":
        # The later key of a dropped table is unknown: the last known key holds.
        assert rows[1:3] == [
            change("update_postimage", a=1, b=1, c=2),
            change("update_postimage", a=1, b=5, c=2),
        ]
        assert rows[-1] == change("delete", a=9, b=None, c=None)
        assert keys(captured, table) == [("a",)]
        return
    whole = [
        {"a": 1, "b": 1, "c": 1},
        {"a": 1, "b": 1, "c": 2},
        {"a": 1, "b": 5, "c": 2},
        {"a": 9, "b": 5, "c": 2},
    ]
    assert [row for row in rows[1:] if row["_change_type"] == "delete"] == [
        change("delete", **row) for row in whole
    ]
    assert [row for row in rows[1:] if row["_change_type"] != "delete"] == [
        change("insert", **row) for row in whole[1:]
    ]
    captured.execute(f"INSERT INTO {table} VALUES (1, 1, 1)")
    assert keys(captured, table) == [("a",), (), ("b",)]


@pytest.mark.parametrize("capture", ["live", "behind"])
def test_S09_under_full_identity_transactions_commit_in_another_order_than_that_of_their_ids(
    captured: Captured, capture: str
) -> None:
    early, late = f"early_{capture}", f"late_{capture}"
    for table in (early, late):
        captured.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, k int)", f"ALTER TABLE {table} REPLICA IDENTITY FULL"
        )
    captured.execute(
        f"INSERT INTO {early} VALUES (1, 10), (2, 20)",
        f"INSERT INTO {late} VALUES (1, 10), (2, NULL), (3, NULL)",
    )
    captured.drain()
    if capture == "behind":
        captured.stop()
    # The writer has its id before the key is moved; two rows have the same id then, which is no key any more.
    with captured.database.connect() as writer:
        writer.execute("SELECT pg_current_xact_id()")
        captured.execute(f"ALTER TABLE {early} DROP CONSTRAINT {early}_pkey, ADD PRIMARY KEY (k)")
        writer.execute(f"UPDATE {early} SET id = 2 WHERE k = 10")
        writer.execute("COMMIT")
    # The one that moves the key has the lowest id and commits last; before it, the later key was null.
    with captured.database.connect() as mover:
        mover.execute("SELECT pg_current_xact_id()")
        captured.execute(f"UPDATE {late} SET k = 20 WHERE id = 2", f"DELETE FROM {late} WHERE id = 3")
        mover.execute(f"ALTER TABLE {late} DROP CONSTRAINT {late}_pkey, ADD PRIMARY KEY (k)")
        mover.execute("COMMIT")
    assert captured.rows(early)[2:] == [change("delete", id=1, k=10), change("insert", id=2, k=10)]
    if capture == "behind":
        whole = [change("delete", id=2, k=None), change("insert", id=2, k=20), change("delete", id=3, k=None)]
        assert captured.rows(late)[3:] == whole
    for table in (early, late):
        captured.execute(f"INSERT INTO {table} VALUES (5, 50)")
        captured.drain()
        captured.execute(f"UPDATE {table} SET id = 6 WHERE k = 50")
        assert captured.rows(table)[-1] == change("update_postimage", id=6, k=50)
        assert keys(captured, table)[-1] == ("k",)


def test_S06_a_key_altered_after_the_last_change_is_known_after_a_restart(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE s06_quiet (a int PRIMARY KEY, b int NOT NULL)",
        "ALTER TABLE s06_quiet REPLICA IDENTITY FULL",
        "INSERT INTO s06_quiet VALUES (1, 1)",
    )
    captured.drain()
    captured.execute("ALTER TABLE s06_quiet DROP CONSTRAINT s06_quiet_pkey, ADD PRIMARY KEY (b)")
    captured.drain()
    captured.stop()
    captured.execute("UPDATE s06_quiet SET a = 2")
    captured.drain()
    captured.stop()
    captured.start()
    captured.execute("UPDATE s06_quiet SET a = 3")
    captured.drain()
    captured.execute("UPDATE s06_quiet SET a = 4")
    moves = [
        change("delete", a=1, b=1),
        change("insert", a=2, b=1),
        change("delete", a=2, b=1),
        change("insert", a=3, b=1),
    ]
    assert captured.rows("s06_quiet")[1:] == [*moves, change("update_postimage", a=4, b=1)]
    assert keys(captured, "s06_quiet") == [("a",), (), ("b",)]


def test_S09_a_key_made_by_the_transaction_that_then_uses_it_is_known(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE s09_self (a int NOT NULL, b int)", "ALTER TABLE s09_self REPLICA IDENTITY FULL"
    )
    captured.execute("INSERT INTO s09_self VALUES (1, 1)")
    with captured.transaction():
        captured.execute(
            "SAVEPOINT s",
            "ALTER TABLE s09_self ADD PRIMARY KEY (a)",
            "RELEASE s",
            "UPDATE s09_self SET b = 2",
        )
    captured.drain()
    captured.execute("UPDATE s09_self SET b = 3")
    assert keys(captured, "s09_self")[-1] == ("a",)
    assert captured.rows("s09_self")[-1] == change("update_postimage", a=1, b=3)


def test_S11_a_unique_index_on_an_expression_is_no_key(captured: Captured) -> None:
    captured.execute(
        "CREATE TABLE s11 (a text NOT NULL, b text)",
        "CREATE UNIQUE INDEX s11_lower ON s11 (lower(a))",
        "CREATE UNIQUE INDEX s11_partial ON s11 (a) WHERE b IS NOT NULL",
        "ALTER TABLE s11 REPLICA IDENTITY FULL",
        "INSERT INTO s11 VALUES ('A', 'x')",
        "UPDATE s11 SET b = 'y'",
    )
    assert captured.rows("s11") == [
        change("insert", a="A", b="x"),
        change("delete", a="A", b="x"),
        change("insert", a="A", b="y"),
    ]
    assert keys(captured, "s11") == [()]


def test_the_catalog_is_read_again_over_a_new_connection_when_the_server_closed_the_old_one(
    captured: Captured,
) -> None:
    captured.stop()
    captured.execute("CREATE TABLE asked (b int, a int, PRIMARY KEY (a, b))")
    with KeyCatalog(captured.settings.address) as catalog:
        before = catalog.load(captured.oid("asked"))
        assert before is not None
        assert before.columns == ("b", "a")
        ended = captured.query(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert (True,) in ended
        again = catalog.load(captured.oid("asked"))
        assert again is not None
        assert again.columns == before.columns
        assert again.asked_at >= before.asked_at > 0
        captured.execute("DROP TABLE asked")
        assert catalog.load(4_000_000_000) is None


def test_R02_X03_a_table_made_and_filled_while_its_transaction_is_sent_has_its_key_in_every_row(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    with capturing(
        postgres_server, tmp_path / "spool", parameters={"options": "-c logical_decoding_work_mem=64kB"}
    ) as made:
        made.start()
        with made.transaction():
            made.execute(
                "CREATE TABLE r02_new (v int, id int PRIMARY KEY, note text)",
                "ALTER TABLE r02_new REPLICA IDENTITY FULL",
            )
            made.execute("INSERT INTO r02_new SELECT i, i, repeat('x', 100) FROM generate_series(1, 3000) i")
            wait_for(lambda: list(made.spool.glob("open/*")), "an open transaction in the spool")
            made.execute("UPDATE r02_new SET v = 0 WHERE id <= 2", "DELETE FROM r02_new WHERE id = 3000")
        made.execute("UPDATE r02_new SET v = 1 WHERE id = 1")
        rows = made.rows("r02_new")
        assert keys(made, "r02_new") == [("id",)]
        there = dict(made.query("SELECT id, v FROM r02_new"))
    mirrored: dict[int, int] = {}
    for row in rows:
        # Before the key was known an update was given as two whole rows, which is right under any key.
        if row["_change_type"] == "delete":
            del mirrored[row["id"]]
        else:
            mirrored[row["id"]] = row["v"]
    assert mirrored == there
