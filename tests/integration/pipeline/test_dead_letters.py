"""Rows that are refused, from the source to the letters, and by a replay to the target."""

from __future__ import annotations

import pytest
import yaml
from pyspark.sql import SparkSession

from penstock.pipeline.orders import change_orders
from penstock.schema import TableName
from tests.fix_pipeline import Mirror, MirrorFactory
from tests.fix_postgres import Database

pytestmark = pytest.mark.spark

ITEMS = TableName("public", "items")


def _configure(made: Mirror, **changes: object) -> None:
    document = yaml.safe_load(made.path.read_text(encoding="utf-8"))
    made.path.write_text(yaml.safe_dump({**document, **changes}), encoding="utf-8")


def test_C08_refused_rows_are_put_aside_and_a_replay_makes_the_mirror_equal(
    spark: SparkSession, database: Database, mirror: MirrorFactory
) -> None:
    database.execute("CREATE TABLE items (id int PRIMARY KEY, due date, size numeric); CREATE TABLE others (id int PRIMARY KEY)")
    database.execute("INSERT INTO items VALUES (1, '2024-01-01', 1), (2, '2024-01-02', 2), (3, NULL, 3), (6, 'infinity', 6)")
    made = mirror(types={"on_unrepresentable": "error"}, refused="dead_letters")
    made.run_once()
    database.execute("INSERT INTO items VALUES (4, 'infinity', 4), (5, '2024-01-05', 5)")
    database.execute(
        "UPDATE items SET size = 'NaN' WHERE id = 1; UPDATE items SET size = 'NaN' WHERE id = 2; INSERT INTO others VALUES (1)"
    )
    database.execute("UPDATE items SET size = 20 WHERE id = 2; DELETE FROM items WHERE id = 3")
    assert not made.run_once().failed
    assert sorted(map(tuple, made.rows("public.items", "id, cast(size as int)"))) == [(1, 1), (2, 20), (5, 5)]

    letters = spark.read.parquet(str(made.config.sink.root / "penstock_dead_letters" / made.config.pipeline))
    shown = sorted((row["key"], row["status"], row["change_type"], row["row"]) for row in letters.collect())
    assert shown == [
        ('{"id":1}', "open", "update_postimage", '{"id":1,"due":"2024-01-01","size":"NaN"}'),
        ('{"id":2}', "superseded", "update_postimage", '{"id":2,"due":"2024-01-02","size":"NaN"}'),
        ('{"id":4}', "open", "insert", '{"id":4,"due":"infinity","size":4}'),
        ('{"id":6}', "open", "snapshot", '{"id":6,"due":"infinity","size":6}'),
    ]

    _configure(made, types={"on_unrepresentable": "null"})
    change_orders(made.config.state, lambda orders: orders.replay_letters([ITEMS]))
    made.run_once()  # nothing happens in the source meanwhile
    assert made.orders().replay == frozenset()
    made.assert_equal("public.items", "public.others")
