"""The whole path from a statement in Postgres to a row in Delta."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest

from penstock.pipeline.table_states import TableState
from penstock.testing.shop import ShopWorkload, create_shop
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database

_EVERYDAY = """
CREATE TABLE everyday (
    id bigint PRIMARY KEY, b boolean, i2 smallint, i4 int, f4 real, f8 double precision, n numeric(12,3),
      u numeric, t text, v varchar(20),
    c char(6), a bytea, d date, ts timestamp, tz timestamptz, g uuid, j json, jb jsonb, x inet
)
"""
_EVERYDAY_ROWS = """
INSERT INTO everyday
SELECT {base} + n, n % 2 = 0, n, -n * 100000, n / 3.0, 'NaN', n * 1.5, '123456789012345678901234567890.5',
       E'zeile\\n"\\\\' || n || '🚰', 'v' || n, 'ab', decode('00ff' || lpad(to_hex(n), 2, '0'), 'hex'),
         date '1999-12-31' + n,
       timestamp '0001-01-01 00:00:00.000001' + n * interval '1 day',
         timestamptz '2020-02-29 23:59:59.999999+13' + n * interval '1 hour',
       md5(n::text)::uuid, '{{"k": [1,  2]}}', '{{"k": [1,  2]}}', '10.0.0.1'
FROM generate_series(1, 20) n;
INSERT INTO everyday (id) VALUES ({base} + 21);
INSERT INTO everyday VALUES ({base} + 22, true, 0, 0, 'Infinity', '-Infinity', 'NaN', 'Infinity', '', '', '',
  '', 'infinity', '-infinity',
       'infinity', md5('')::uuid, 'null', 'null', '::1');
INSERT INTO everyday VALUES ({base} + 23, true, 0, 0, 0, 0, 0, 0, '', '', '', '', '0044-03-15 BC',
  '0044-03-15 12:00:00 BC',
       '20000-01-01 00:00:00+00', md5('')::uuid, '1', '1', '::1/64');
"""


def test_changes_of_every_kind_reach_the_target(database: Database, mirror: MirrorFactory) -> None:
    create_shop(database.dsn, customers=50, orders=200)
    shop = mirror(tables=["shop.*"])
    shop.run_once()
    shop.assert_equal("shop.customers", "shop.orders", "shop.order_items")
    workload = ShopWorkload(database.dsn, seed=1)
    with workload:
        while workload.transactions < 300:
            time.sleep(0.01)
    shop.run_once()
    assert workload.changes > 300
    shop.assert_equal("shop.customers", "shop.orders", "shop.order_items")


def test_a_value_is_the_same_by_snapshot_and_by_stream(database: Database, mirror: MirrorFactory) -> None:
    database.execute(_EVERYDAY)
    database.execute(_EVERYDAY_ROWS.format(base=0))
    everyday = mirror()
    everyday.run_once()
    database.execute(_EVERYDAY_ROWS.format(base=1000))
    everyday.run_once()
    everyday.assert_equal("public.everyday")
    rows = {row["id"]: row for row in everyday.rows("public.everyday")}
    assert len(rows) == 46
    for number in range(1, 24):
        by_snapshot, by_stream = rows[number].asDict(), rows[1000 + number].asDict()
        del by_snapshot["id"], by_stream["id"]
        assert repr(by_snapshot) == repr(by_stream)
    assert rows[3]["c"] == "ab    "
    assert rows[3]["x"] == "10.0.0.1"
    assert rows[2]["n"] == Decimal("3.000")


def test_value_beyond_its_column_is_in_exact(database: Database, mirror: MirrorFactory) -> None:
    database.execute(_EVERYDAY)
    database.execute(_EVERYDAY_ROWS.format(base=0))
    everyday = mirror()
    everyday.run_once()
    rows = {row["id"]: row for row in everyday.rows("public.everyday")}
    assert rows[1]["u"] is None
    assert rows[1]["_exact"] == {"u": "123456789012345678901234567890.5"}
    assert rows[21]["_exact"] is None
    unholdable = {"n": "NaN", "u": "Infinity", "d": "infinity", "ts": "-infinity", "tz": "infinity"}
    assert rows[22]["_exact"] == unholdable
    assert all(rows[22][name] is None for name in unholdable)
    assert set(rows[23]["_exact"]) == {"d", "ts", "tz"}


def test_there_is_no_gap_and_no_overlap_between_snapshot_and_stream(
    database: Database, mirror: MirrorFactory
) -> None:
    create_shop(database.dsn, customers=100, orders=2000)
    shop = mirror(tables=["shop.*"], snapshot_chunk_bytes=65536)
    with ShopWorkload(database.dsn, seed=2) as workload:
        shop.run_once()
        during = workload.transactions
    assert during > 50
    shop.run_once()
    shop.assert_equal("shop.customers", "shop.orders", "shop.order_items")


def test_N02_a_transaction_open_while_the_snapshot_is_taken_is_counted_once(
    database: Database, mirror: MirrorFactory
) -> None:
    """N02: creating the snapshot waits for the transaction, or its changes are streamed; never both, never
    neither.
    """
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (id int PRIMARY KEY)")
    database.execute("INSERT INTO t VALUES (1, 'before')")
    items = mirror()
    items.run_once()
    with database.connect() as held:
        held.execute("UPDATE t SET v = 'during' WHERE id = 1")
        held.execute("INSERT INTO t VALUES (2, 'during')")
        database.execute("INSERT INTO other VALUES (1)")
        items.run_once()
        assert [row["v"] for row in items.rows("public.t")] == ["before"]
        held.commit()
    items.run_once()
    items.assert_equal("public.t", "public.other")


def test_partitions_arrive_in_the_table_of_their_root(database: Database, mirror: MirrorFactory) -> None:
    database.execute("CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)")
    database.execute("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)")
    database.execute("INSERT INTO p SELECT g, 'v' || g FROM generate_series(50, 150) g")
    parts = mirror()
    parts.run_once()
    database.execute("INSERT INTO p VALUES (1, 'first'), (199, 'last')")
    database.execute("UPDATE p SET id = id + 101 WHERE id BETWEEN 50 AND 60")
    database.execute("DELETE FROM p WHERE id = 120")
    parts.run_once()
    parts.assert_equal("public.p")


def test_an_empty_table_is_mirrored(database: Database, mirror: MirrorFactory) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    empty = mirror()
    empty.run_once()
    empty.assert_equal("public.t")
    database.execute("INSERT INTO t VALUES (1)")
    empty.run_once()
    empty.assert_equal("public.t")


def test_truncate_empties_the_mirror_in_order(database: Database, mirror: MirrorFactory) -> None:
    """R12."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); "
        "INSERT INTO t SELECT g, 'old' FROM generate_series(1, 100) g"
    )
    items = mirror()
    items.run_once()
    database.execute(
        "UPDATE t SET v = 'lost' WHERE id < 10; TRUNCATE t; INSERT INTO t VALUES (1, 'new'), (500, 'new')"
    )
    items.run_once()
    items.assert_equal("public.t")
    assert sorted(row["id"] for row in items.rows("public.t")) == [1, 500]


def test_names_are_kept_as_they_are(database: Database, mirror: MirrorFactory) -> None:
    database.execute(
        'CREATE TABLE "Odd Name" ("The Id" int '
        'PRIMARY KEY, "a.b" text, "q""uote" text, "back`tick" int, "select" text)'
    )
    database.execute("""INSERT INTO "Odd Name" VALUES (1, 'a', 'b', 2, 'c')""")
    odd = mirror()
    odd.run_once()
    database.execute(
        """UPDATE "Odd Name" SET "a.b" = 'changed' WHERE "The Id" = 1;
        INSERT INTO "Odd Name" VALUES (2, 'x', 'y', 3, 'z')"""
    )
    odd.run_once()
    odd.assert_equal('public."Odd Name"')


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL", "USING INDEX t_code"])
def test_every_replica_identity_that_names_rows_is_mirrored(
    database: Database, mirror: MirrorFactory, identity: str
) -> None:
    """R01, R02, R03, R08."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL, big text, n int)")
    database.execute("CREATE UNIQUE INDEX t_code ON t (code); ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    database.execute(f"ALTER TABLE t REPLICA IDENTITY {identity}")
    database.execute("INSERT INTO t SELECT g, 'c' || g, repeat('x', 5000), g FROM generate_series(1, 20) g")
    items = mirror()
    items.run_once()
    database.execute(
        "UPDATE t SET n = n + 1; DELETE FROM t WHERE id = 3; "
        "UPDATE t SET id = id + 100, code = 'm' || id WHERE id > 15"
    )
    items.run_once()
    items.assert_equal("public.t")


@pytest.mark.versions(16, 18)
def test_T33_a_key_with_a_generated_column_fails_its_table_once_where_the_stream_does_not_carry_it(
    database: Database, mirror: MirrorFactory, postgres_version: int
) -> None:
    """Its key would seem to change with every epoch. With whole rows, and as a log, it works."""
    for name in ("keyed", "whole", "log"):
        database.execute(
            f"CREATE TABLE {name} (a int, b int, g int GENERATED ALWAYS AS (b / 2) STORED, "
            "PRIMARY KEY (a, g))"
        )
        database.execute(f"INSERT INTO {name} VALUES (1, 1), (1, 2), (2, 1)")
    database.execute("ALTER TABLE whole REPLICA IDENTITY FULL")
    made = mirror(tables=["public.*", {"table": "public.log", "mode": "append"}])
    made.run_once()
    for name in ("keyed", "whole", "log"):
        database.execute(
            f"UPDATE {name} SET b = 5 WHERE a = 2; DELETE FROM {name} WHERE b = 1; "
            f"INSERT INTO {name} VALUES (3, 3)"
        )
    found = made.run_once()
    states = {name.removeprefix("public."): status.state for name, status in found.tables.items()}
    is_carried = postgres_version >= 18
    keyed = TableState.STREAMING if is_carried else TableState.FAILED
    assert states == {"keyed": keyed, "whole": TableState.STREAMING, "log": TableState.STREAMING}
    assert is_carried or "PEN-1402" in (found.tables["public.keyed"].reason or "")
    assert sorted(made.rows("public.whole", "a, b")) == [(1, 2), (2, 5), (3, 3)]
    assert len(made.rows("public.log")) == (7 if is_carried else 6), (
        "a key that changes is a delete and an insert"
    )
