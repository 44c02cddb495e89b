"""Every capture method in a whole pipeline, killed with SIGKILL once and resumed: the targets end equal to
the source.

`test_kill.py` kills at random moments, more often, with `capture: wal` only. A capture method is one line in
`CAPTURES`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.spark.session import SHORT_LIVED
from penstock.testing.shop import ShopWorkload, create_shop
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.recovery.killable_run import kill, started, wait_for_word
from tests.support.waiting import wait_for

CAPTURES: dict[str, dict[str, Any]] = {
    "wal": {},
    "polling": {
        "polling": {"interval": "200 ms", "cursors": {"shop.orders": "changed_at"}}
    },  # the other two tables by xmin
    "trigger": {},
}

# Expressions that compare source and target: in Postgres and in Spark SQL.
COLUMNS = {
    "shop.customers": "id, name, email, vip, balance",
    "shop.orders": "cast(id AS {text}), customer_id, status, total, md5(cast(note AS {bytes}))",
    "shop.order_items": "cast(order_id AS {text}), line, product, quantity, price",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capture", CAPTURES)
def test_tables_equal_the_source_after_a_kill_under_load(
    database: Database, mirror: MirrorFactory, tmp_path: Path, capture: str
) -> None:
    create_shop(database.dsn, customers=100, orders=2_000)
    keep_changed_at(database)
    source = {"dsn": database.dsn, "capture": capture, **CAPTURES[capture]}
    small = {"master": "local[2]", "conf": SHORT_LIVED}
    shop = mirror(tables=["shop.*"], source=source, snapshot_chunk_bytes=262_144, spark=small)
    log = tmp_path / "run.log"
    with ShopWorkload(database.dsn, seed=7, pause_seconds=0.02) as workload, database.connect() as late:
        late.execute("SELECT now()")  # it begins before all others, and commits last
        with started(shop, log) as process:
            wait_for_word("epoch", process, log)
            late.execute("INSERT INTO shop.customers (name) VALUES ('late')")
            late.execute("INSERT INTO shop.orders (customer_id, status) VALUES (1, 'late')")
            at = workload.transactions
            wait_for(
                lambda: workload.transactions > at + 20,
                "some more transactions",
                lambda: workload.transactions,
            )
            kill(process, everything=True)
        late.commit()
        at = workload.transactions
        wait_for(
            lambda: workload.transactions > at + 20, "some between two polls", lambda: workload.transactions
        )
    shop.run_once()
    assert_same(database, shop)


def keep_changed_at(database: Database) -> None:
    """A column with the time of the last change of each order, set by the server."""
    database.execute(
        """
        ALTER TABLE shop.orders ADD changed_at timestamptz NOT NULL DEFAULT now();
        CREATE INDEX ON shop.orders (changed_at);
        CREATE FUNCTION shop.changed() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN NEW.changed_at := now(); RETURN NEW; END $$;
        CREATE TRIGGER changed BEFORE UPDATE ON shop.orders FOR EACH ROW EXECUTE FUNCTION shop.changed();
        """
    )


def assert_same(database: Database, shop: Mirror) -> None:
    """Call it while no session writes to the source."""
    for table, columns in COLUMNS.items():
        expected = database.query(f"SELECT {columns.format(text='text', bytes='bytea')} FROM {table}")
        found = [tuple(row) for row in shop.rows(table, columns.format(text="string", bytes="binary"))]
        assert len(expected) > 100
        assert sorted(map(repr, found)) == sorted(map(repr, expected)), table
