"""Where the server refuses the application's UPDATE, since the publication does not hold all of a table's replica identity."""

from __future__ import annotations

import psycopg
import pytest

from penstock.capture.provision import inspect_coverage
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from tests.fix_postgres import Database


@pytest.mark.versions(15, 18)
def test_P05_R02_a_column_list_of_a_table_under_replica_identity_full_is_a_blocker_since_its_updates_fail(
    database: Database, address: SourceAddress
) -> None:
    database.execute("CREATE TABLE keyed (id int PRIMARY KEY, v int, secret int); CREATE TABLE bare (id int, v int)")
    database.execute("CREATE TABLE parted (id int PRIMARY KEY, v int, secret int) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (10); CREATE TABLE rest PARTITION OF parted DEFAULT")
    database.execute("INSERT INTO keyed VALUES (1, 1, 1); INSERT INTO bare VALUES (1, 1); INSERT INTO parted VALUES (1, 1, 1)")
    for table in ("keyed", "bare", "part"):
        database.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    listed = "keyed (id, v), bare (id, v) WHERE (id > 0), parted (id, v)"
    database.execute(f"CREATE PUBLICATION pub FOR TABLE {listed} WITH (publish_via_partition_root = true)")
    names = {TableName("public", name) for name in ("keyed", "bare", "parted")}
    for name in names:
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            database.execute(f"UPDATE {name} SET v = 2")
    report = inspect_coverage(address, "pub", names)
    assert [blocker.code for blocker in report.blockers] == ["PEN-1105"] * 3
    assert {table for blocker in report.blockers for table in blocker.tables} == names
    assert [blocker.what for blocker in report.blockers if "partition public.part has REPLICA IDENTITY FULL" in blocker.what]
    for blocker in report.blockers:
        database.execute(blocker.remedy.removeprefix("to publish all its columns: "))
    assert inspect_coverage(address, "pub", names).satisfied
    for name in names:
        database.execute(f"UPDATE {name} SET v = 2")
    shown = "SELECT tablename, attnames::text[], rowfilter IS NOT NULL FROM pg_publication_tables ORDER BY 1"
    assert database.query(shown) == [("bare", ["id", "v"], True), ("keyed", ["id", "v"], False), ("parted", ["id", "v"], False)]


@pytest.mark.versions(15, 18)
def test_P05_R02_a_column_list_under_full_is_no_blocker_where_nothing_but_inserts_is_published(
    database: Database, address: SourceAddress
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, v int)")
    database.execute("ALTER TABLE orders REPLICA IDENTITY FULL; CREATE PUBLICATION pub FOR TABLE orders (id) WITH (publish = 'insert')")
    (blocker,) = inspect_coverage(address, "pub", {TableName("public", "orders")}).blockers
    assert "leaves out" in blocker.what
    database.execute("UPDATE orders SET v = 2")


@pytest.mark.versions(18)
def test_R04_T33_an_identity_with_a_generated_column_that_is_not_published_is_refused_since_its_updates_fail(
    database: Database, address: SourceAddress
) -> None:
    database.execute("CREATE TABLE virtual (id int PRIMARY KEY, v int, g int GENERATED ALWAYS AS (v * 2) VIRTUAL)")
    database.execute("CREATE TABLE stored (id int PRIMARY KEY, v int, g int GENERATED ALWAYS AS (v * 2) STORED)")
    database.execute("CREATE TABLE keyed (v int, g int GENERATED ALWAYS AS (v * 2) STORED PRIMARY KEY)")
    for table in ("virtual", "stored"):
        database.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL; INSERT INTO {table} VALUES (1, 1)")
    names = {TableName("public", name) for name in ("virtual", "stored", "keyed")}
    (blocker,) = inspect_coverage(address, "own", names).blockers
    assert (blocker.code, blocker.tables) == ("PEN-1405", (TableName("public", "virtual"),)), "stored ones are published by ours"
    database.execute("CREATE PUBLICATION pub FOR TABLE virtual, stored, keyed; INSERT INTO keyed VALUES (1)")
    for name in names:
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            database.execute(f"UPDATE {name} SET v = 2")
    report = inspect_coverage(address, "pub", names)
    assert [blocker.code for blocker in report.blockers] == ["PEN-1405"] * 3
    for blocker in report.blockers:
        database.execute(blocker.remedy)
    assert inspect_coverage(address, "pub", names).satisfied
    for name in names:
        database.execute(f"UPDATE {name} SET v = 2")
