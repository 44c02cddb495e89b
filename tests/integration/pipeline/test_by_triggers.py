"""A pipeline whose changes are written down by triggers, on a server that needs no logical replication for it."""

from __future__ import annotations

import pytest

from penstock.errors import ChangeTableMissingError
from penstock.testing.shop import ShopWorkload, create_shop
from tests.fix_pipeline import MirrorFactory
from tests.fix_postgres import Database


def test_changes_by_triggers_reach_the_target_and_leave_the_source(database: Database, mirror: MirrorFactory) -> None:
    create_shop(database.dsn, customers=50, orders=200)
    database.execute("CREATE TABLE shop.notes (note text)")
    database.execute("INSERT INTO shop.notes VALUES ('twice'), ('twice'), (NULL)")
    # `*` would select the change table too, if that were not the capture's own.
    shop = mirror(source={"dsn": database.dsn, "capture": "trigger"}, tables=["*.*"])
    tables = ("shop.customers", "shop.orders", "shop.order_items", "shop.notes")
    shop.run_once()
    shop.assert_equal(*tables)
    workload = ShopWorkload(database.dsn, seed=1)
    with workload:
        while workload.transactions < 200:
            pass
    database.execute("DELETE FROM shop.notes WHERE ctid = (SELECT min(ctid) FROM shop.notes)")
    database.execute("ALTER TABLE shop.notes ADD COLUMN more int DEFAULT 5")
    database.execute("UPDATE shop.notes SET more = 6 WHERE note IS NULL")
    shop.run_once()
    shop.assert_equal(*tables)
    assert database.query("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
    assert database.query(f"SELECT count(*) FROM {shop.slot}.commits WHERE position <= (SELECT position FROM {shop.slot}.resume)") == [(0,)]
    database.execute(f"DROP SCHEMA {shop.slot} CASCADE")
    with pytest.raises(ChangeTableMissingError):
        shop.run_once()
