"""Changes received through every kind of publication equal the rows that a snapshot reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.capture.provision import ensure_capture, inspect_coverage
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from tests.support.fix_postgres import Database, PostgresServer
from tests.support.publication.stream import Event, Follower, folded


@pytest.fixture
def follower(database: Database, tmp_path: Path) -> Follower:
    return Follower(database, tmp_path)


def kinds(events: list[Event], table: str) -> list[tuple[str, object]]:
    return [(event.kind, event.row.get("id")) for event in events if event.table == table]


@pytest.mark.versions(14, 18)
def test_P04_a_row_that_moves_between_partitions_is_right_at_the_root(
    database: Database, follower: Follower
) -> None:
    database.execute("CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10)")
    database.execute(
        "CREATE TABLE high (v text, id int NOT NULL); "
        "ALTER TABLE parted ATTACH PARTITION high FOR VALUES FROM (10) TO (20)"
    )
    ensure_capture(follower.address, follower.slot, "pub", [TableName("public", "parted")])
    database.execute("INSERT INTO parted VALUES (1, 'a'), (2, 'b'), (11, 'c')")
    database.execute("UPDATE parted SET id = id + 10 WHERE id = 2; UPDATE parted SET v = 'z' WHERE id = 11")
    events = follower.drain()
    assert {event.table for event in events} == {"public.parted"}
    assert folded([], events, "public.parted") == sorted(
        follower.snapshot("public.parted"), key=lambda row: row["id"]
    )


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("is_by_root", [True, False])
def test_P04_a_row_moved_between_partitions_is_deleted_from_one_and_inserted_into_the_other(
    database: Database, follower: Follower, is_by_root: bool
) -> None:
    """The server writes a move as a delete and an insert, as for any key change under the root: the partition
    key is in the key.
    """
    database.execute(
        "CREATE TABLE parted (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part)"
    )
    database.execute("CREATE TABLE low PARTITION OF parted FOR VALUES IN (1)")
    database.execute("CREATE TABLE high (v text, part int NOT NULL, id int NOT NULL)")
    database.execute("ALTER TABLE parted ATTACH PARTITION high FOR VALUES IN (2)")
    database.execute(
        f"CREATE PUBLICATION pub FOR TABLE parted WITH (publish_via_partition_root = {is_by_root})"
    )
    follower.create_slot()
    database.execute("INSERT INTO parted VALUES (1, 1, 'a'), (2, 2, 'b')")
    database.execute(
        "UPDATE parted SET part = 2 WHERE id = 1; UPDATE parted SET v = 'c' WHERE id = 2; "
        "UPDATE parted SET id = 3 WHERE id = 2"
    )
    low, high = ("public.parted", "public.parted") if is_by_root else ("public.low", "public.high")
    assert follower.drain() == [
        Event(low, "insert", {"id": 1, "part": 1, "v": "a"}),
        Event(high, "insert", {"id": 2, "part": 2, "v": "b"}),
        Event(low, "delete", {"id": 1, "part": 1, "v": None}),
        Event(high, "insert", {"id": 1, "part": 2, "v": "a"}),
        Event(high, "update_postimage", {"id": 2, "part": 2, "v": "c"}),
        Event(high, "delete", {"id": 2, "part": 2, "v": None}),
        Event(high, "insert", {"id": 3, "part": 2, "v": "c"}),
    ]


def test_S12_a_partition_attached_while_streaming_is_captured_from_then_on(
    database: Database, follower: Follower
) -> None:
    """Its earlier rows were never written to the partitioned table and are in no log; pipelines detect that
    and resync the table.
    """
    database.execute("CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10)")
    database.execute("CREATE TABLE high (v text, id int PRIMARY KEY); INSERT INTO high VALUES ('before', 11)")
    ensure_capture(follower.address, follower.slot, "pub", [TableName("public", "parted")])
    with follower.capture() as capture:
        database.execute("INSERT INTO parted VALUES (1, 'low')")
        follower.reach(capture)
        database.execute(
            "INSERT INTO high VALUES ('apart', 12); "
            "ALTER TABLE parted ATTACH PARTITION high FOR VALUES FROM (10) TO (20)"
        )
        database.execute(
            "INSERT INTO high VALUES ('direct', 13); INSERT INTO parted VALUES (14, 'by the root')"
        )
        database.execute("UPDATE parted SET v = 'changed' WHERE id = 11")
        follower.reach(capture)
    assert follower.events() == [
        Event("public.parted", "insert", {"id": 1, "v": "low"}),
        Event("public.parted", "insert", {"id": 13, "v": "direct"}),
        Event("public.parted", "insert", {"id": 14, "v": "by the root"}),
        Event("public.parted", "update_postimage", {"id": 11, "v": "changed"}),
    ]


def test_S12_attached_and_detached_partitions_are_followed_under_the_root(
    database: Database, follower: Follower
) -> None:
    """Subpartitions and default partitions too. A detached partition becomes an ordinary table that is not
    published.
    """
    database.execute("CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10)")
    ensure_capture(follower.address, follower.slot, "pub", [TableName("public", "parted")])
    with follower.capture() as capture:
        database.execute("INSERT INTO parted VALUES (1, 'low')")
        follower.reach(capture)
        database.execute(
            "CREATE TABLE mid PARTITION OF parted FOR VALUES FROM (10) TO (20) PARTITION BY LIST (id)"
        )
        database.execute(
            "CREATE TABLE mid_rest PARTITION OF mid DEFAULT; CREATE TABLE rest PARTITION OF parted DEFAULT"
        )
        database.execute("INSERT INTO parted VALUES (11, 'sub'), (99, 'default')")
        database.execute("ALTER TABLE parted DETACH PARTITION low; INSERT INTO low VALUES (2, 'apart')")
        database.execute("INSERT INTO parted VALUES (98, 'after')")
        follower.reach(capture)
    events = follower.events()
    assert kinds(events, "public.parted") == [("insert", 1), ("insert", 11), ("insert", 99), ("insert", 98)]
    assert {event.table for event in events} == {"public.parted"}


@pytest.mark.versions(15, 18)
def test_P05_column_lists_and_row_filters_hold_for_snapshot_and_stream_alike(
    database: Database, follower: Follower
) -> None:
    """N09: a row that enters the filter arrives as an insert, one that leaves it as a delete; the server sees
    to that.
    """
    database.execute("CREATE TABLE t (id int PRIMARY KEY, region text, secret text)")
    database.execute(
        "ALTER TABLE t REPLICA IDENTITY FULL; CREATE TABLE c (id int PRIMARY KEY, v int, secret text)"
    )
    database.execute("CREATE PUBLICATION pub FOR TABLE t WHERE (region = 'EU'), c (id, v) WHERE (id <> 3)")
    database.execute(
        "INSERT INTO t SELECT g, CASE WHEN g % 2 = 0 THEN 'EU' ELSE 'US' END, 's' "
        "FROM generate_series(1, 6) g"
    )
    database.execute("INSERT INTO c VALUES (1, 1, 's'), (3, 3, 's')")
    required = {TableName("public", "t"), TableName("public", "c")}
    assert inspect_coverage(follower.address, "pub", required).satisfied
    follower.create_slot()
    before = follower.snapshot("public.t")
    assert sorted(row["id"] for row in before) == [2, 4, 6]
    assert follower.snapshot("public.c") == [{"id": 1, "v": 1}]
    database.execute(
        "UPDATE t SET region = 'EU' WHERE id = 1; UPDATE t SET region = 'US' WHERE id = 2; "
        "DELETE FROM t WHERE id IN (3, 4)"
    )
    database.execute("INSERT INTO t VALUES (7, 'EU', 's'), (9, 'US', 's')")
    database.execute("UPDATE c SET v = v + 1, secret = 'x'; INSERT INTO c VALUES (5, 5, 's')")
    events = follower.drain()
    assert kinds(events, "public.t") == [("insert", 1), ("delete", 2), ("delete", 4), ("insert", 7)]
    for table, rows in (("public.t", before), ("public.c", [{"id": 1, "v": 1}])):
        assert folded(rows, events, table) == sorted(follower.snapshot(table), key=lambda row: row["id"])
    assert all("secret" not in event.row for event in events if event.table == "public.c")


def test_P05_a_row_filter_of_a_partitioned_table_holds_in_every_partition(
    database: Database, follower: Follower
) -> None:
    database.execute('CREATE TABLE parted (id int PRIMARY KEY, "Odd %" text) PARTITION BY RANGE (id)')
    database.execute('CREATE TABLE low ("Odd %" text, id int NOT NULL)')
    database.execute("ALTER TABLE parted ATTACH PARTITION low FOR VALUES FROM (0) TO (10)")
    database.execute(
        "CREATE PUBLICATION pub FOR TABLE parted WHERE (id > 3) WITH (publish_via_partition_root = true)"
    )
    database.execute("INSERT INTO parted VALUES (1, 'a'), (5, 'b')")
    assert [row["id"] for row in follower.snapshot("public.parted")] == [5]


@pytest.mark.versions(17, 18)
def test_T33_our_own_publication_carries_generated_columns_where_the_server_can(
    database: Database, follower: Follower, postgres_server: PostgresServer
) -> None:
    database.execute("CREATE TABLE g (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)")
    ensure_capture(follower.address, follower.slot, "pub", [TableName("public", "g")])
    database.execute("INSERT INTO g VALUES (4)")
    expected = {"id": 4, "twice": 8} if postgres_server.version >= 18 else {"id": 4}
    assert [event.row for event in follower.drain()] == [expected]
    assert follower.snapshot("public.g") == [expected]


def test_P08_captured_tables_are_those_the_server_sends_and_a_removed_one_is_named(
    database: Database, follower: Follower
) -> None:
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); "
        "CREATE TABLE c (id int PRIMARY KEY)"
    )
    a, b = TableName("public", "a"), TableName("public", "b")
    ensure_capture(follower.address, follower.slot, "pub", [a, b])
    with follower.capture() as capture:
        database.execute("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1); INSERT INTO c VALUES (1)")
        follower.reach(capture)
        database.execute("ALTER PUBLICATION pub DROP TABLE b; ALTER PUBLICATION pub ADD TABLE c")
        database.execute("INSERT INTO a VALUES (2); INSERT INTO b VALUES (2); INSERT INTO c VALUES (2)")
        follower.reach(capture)
    events = [(event.table, event.row["id"]) for event in follower.events()]
    assert sorted(events) == [("public.a", 1), ("public.a", 2), ("public.b", 1), ("public.c", 2)]
    report = inspect_coverage(follower.address, "pub", {a, b})
    assert (report.satisfied, report.missing, report.present) == (False, frozenset({b}), frozenset({a}))
    _, added = ensure_capture(follower.address, follower.slot, "pub", [a, b])
    assert added == [b]


@pytest.mark.versions(15, 18)
@pytest.mark.parametrize("scope", ["FOR ALL TABLES", "FOR TABLES IN SCHEMA public"])
def test_S08_a_table_created_later_is_captured_from_its_first_row(
    database: Database, follower: Follower, scope: str
) -> None:
    """Also in the transaction that creates it. A child of an inherited table is published separately;
    unlogged and temporary tables send nothing.
    """
    database.execute(f"CREATE PUBLICATION pub {scope} WITH (publish_via_partition_root = true)")
    follower.create_slot()
    with follower.capture() as capture:
        database.execute("CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later VALUES (1)")
        follower.reach(capture)
        database.execute("INSERT INTO later VALUES (2)")
        database.execute(
            "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (later); INSERT INTO child VALUES (3)"
        )
        database.execute("CREATE UNLOGGED TABLE fast (id int PRIMARY KEY); INSERT INTO fast VALUES (4)")
        database.execute("CREATE TEMP TABLE brief (id int PRIMARY KEY); INSERT INTO brief VALUES (5)")
        follower.reach(capture)
    events = [(event.table, event.row["id"]) for event in follower.events()]
    assert events == [("public.later", 1), ("public.later", 2), ("public.child", 3)]
    assert follower.snapshot("public.later") == [{"id": 1}, {"id": 2}]
    assert inspect_coverage(
        SourceAddress.parse(database.dsn), "pub", {TableName("public", "later")}
    ).satisfied


def test_N09_a_capture_through_the_contract_reads_the_same_rows(
    database: Database, follower: Follower, tmp_path: Path
) -> None:
    from penstock import WalCapture
    from penstock.capture.settings import CaptureSettings
    from penstock.contracts.capture import Upsert

    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, secret text); INSERT INTO t VALUES (1, 's'), (2, 's')"
    )
    database.execute("CREATE PUBLICATION pub FOR TABLE t (id) WHERE (id > 1)")
    capture = WalCapture(CaptureSettings(follower.address, follower.slot, "pub", tmp_path / "spool"))
    changes = capture.snapshot([TableName("public", "t")])
    assert [change.event.row for change in changes if isinstance(change.event, Upsert)] == [{"id": 2}]
