"""A pipeline with `capture: trigger` on a server without logical replication."""

from __future__ import annotations

import pytest

from penstock.errors import ChangeTableMissingError
from penstock.testing.shop import ShopWorkload, create_shop
from penstock.testing.streams import wait_for
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database


def test_changes_by_triggers_reach_the_target_and_leave_the_source(
    database: Database, mirror: MirrorFactory
) -> None:
    create_shop(database.dsn, customers=50, orders=200)
    database.execute("CREATE TABLE shop.notes (note text)")
    database.execute("INSERT INTO shop.notes VALUES ('twice'), ('twice'), (NULL)")
    database.execute(
        "CREATE TABLE shop.events (id int, region text, twice int GENERATED ALWAYS AS (id * 2) STORED, "
        "PRIMARY KEY (id, region)) "
        "PARTITION BY LIST (region)"
    )
    for region in ("north", "south"):
        database.execute(
            f"CREATE TABLE shop.events_{region} PARTITION OF shop.events FOR VALUES IN ('{region}')"
        )
    database.execute("INSERT INTO shop.events SELECT n, 'north' FROM generate_series(1, 20) n")
    database.execute("CREATE TABLE shop.visits (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    database.execute(
        "CREATE TABLE shop.visits_rest PARTITION OF shop.visits DEFAULT; "
        "INSERT INTO shop.visits VALUES (1), (2)"
    )
    # `*` would select the change table too, if that were not the capture's own.
    shop = mirror(source={"dsn": database.dsn, "capture": "trigger"}, tables=["*.*"])
    tables = ("shop.customers", "shop.orders", "shop.order_items", "shop.notes", "shop.events", "shop.visits")
    shop.run_once()
    shop.assert_equal(*tables)
    with ShopWorkload(database.dsn, seed=1) as workload:
        wait_for(
            lambda: workload.transactions >= 200, "200 transactions", lambda: workload.transactions, 60.0
        )
    database.execute("DELETE FROM shop.notes WHERE ctid = (SELECT min(ctid) FROM shop.notes)")
    database.execute(
        "UPDATE shop.events SET region = 'south', id = id + 100 WHERE id % 2 = 0; "
        "DELETE FROM shop.events WHERE id = 1"
    )
    database.execute(
        "TRUNCATE shop.order_items; "
        "INSERT INTO shop.order_items SELECT id, 1, repeat('x', 100000), 1, 1 FROM shop.orders LIMIT 2"
    )
    database.execute(
        "TRUNCATE shop.visits_rest; INSERT INTO shop.visits VALUES (2), (3)"
    )  # for which no trigger of the root fires
    database.execute("ALTER TABLE shop.notes ADD COLUMN more int DEFAULT 5")
    database.execute("UPDATE shop.notes SET more = 6 WHERE note IS NULL")
    shop.run_once()
    shop.assert_equal(*tables)
    assert database.query(
        "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    ) == [(0,)]
    assert database.query(
        f"SELECT count(*) FROM {shop.slot}.commits WHERE position <= (SELECT position "
        f"FROM {shop.slot}.resume)"
    ) == [(0,)]
    database.execute(f"DROP SCHEMA {shop.slot} CASCADE")
    with pytest.raises(ChangeTableMissingError):
        shop.run_once()
