"""Rejected rows from the source to the dead-letter queue, and by a replay to the target."""

from __future__ import annotations

import stat

import pytest
import yaml
from pyspark.sql import SparkSession

from penstock.pipeline.table_overrides import change_overrides
from penstock.pipeline.verify.verify import verify_tables
from penstock.schema import TableName
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database

pytestmark = pytest.mark.spark

ITEMS, SHARDS = TableName("public", "items"), TableName("lake", "shards")


def _configure(made: Mirror, **changes: object) -> None:
    document = yaml.safe_load(made.path.read_text(encoding="utf-8"))
    made.path.write_text(yaml.safe_dump({**document, **changes}), encoding="utf-8")


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_C08_rejected_rows_become_dead_letters_and_a_replay_makes_the_mirror_equal(
    spark: SparkSession, database: Database, mirror_into: MirrorFactory, kind: str
) -> None:
    database.execute(
        "CREATE TABLE items (id int PRIMARY KEY, due date, size numeric); "
        "CREATE TABLE others (id int PRIMARY KEY)"
    )
    database.execute(
        "INSERT INTO items VALUES (1, '2024-01-01', 1), (2, '2024-01-02', 2), (3, NULL, 3), (6, "
        "'infinity', 6)"
    )
    for shard in ("shard_a", "shard_b"):
        database.execute(
            f"CREATE TABLE {shard} (id int PRIMARY KEY, due date); "
            f"INSERT INTO {shard} VALUES (1, '2024-01-01')"
        )
    database.execute(
        "INSERT INTO shard_b VALUES (2, 'infinity'); CREATE TABLE cast_items (id int PRIMARY KEY, size text)"
    )
    database.execute("INSERT INTO cast_items VALUES (1, '1'), (2, 'large')")
    rules = [
        {"match": "public.*"},
        {"match": "public.shard_*", "into": "lake.shards"},
        {"table": "public.cast_items", "columns": {"cast": {"size": "int"}, "rename": {"id": "item"}}},
    ]
    made = mirror_into(kind, tables=rules, types={"on_unrepresentable": "error"}, refused="dead_letters")
    assert not made.run_once().failed
    database.execute("INSERT INTO items VALUES (4, 'infinity', 4), (5, '2024-01-05', 5)")
    database.execute(
        "UPDATE items SET size = 'NaN' WHERE id = 1; UPDATE items SET size = 'NaN' WHERE id = 2; "
        "INSERT INTO others VALUES (1)"
    )
    database.execute("UPDATE items SET size = 20 WHERE id = 2; DELETE FROM items WHERE id = 3")
    assert not made.run_once().failed
    assert sorted(map(tuple, made.rows("public.items", "id, cast(size as int)"))) == [(1, 1), (2, 20), (5, 5)]

    report = verify_tables(spark, made.config)
    assert report.equal_but_held, report
    held = {str(each.table): each.comparison.held for each in report.verdicts if each.comparison is not None}
    assert held == {"lake.shards": 1, "public.cast_items": 1, "public.items": 3, "public.others": 0}

    root = made.config.sink.root
    private = [made.config.state, made.config.spool, root / "penstock_dead_letters" / made.config.pipeline]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o700}, "they hold rows of the source"
    assert {stat.S_IMODE(path.stat().st_mode) for path in private[2].rglob("*.parquet")} == {0o600}
    letters = spark.read.parquet(str(root / "penstock_dead_letters" / made.config.pipeline))
    shown = sorted(
        (row["key"], row["status"], row["change_type"], row["row"])
        for row in letters.where("table = 'public.items'").collect()
    )
    assert shown == [
        ('{"id":1}', "open", "update_postimage", '{"id":1,"due":"2024-01-01","size":"NaN"}'),
        ('{"id":2}', "superseded", "update_postimage", '{"id":2,"due":"2024-01-02","size":"NaN"}'),
        ('{"id":4}', "open", "insert", '{"id":4,"due":"infinity","size":4}'),
        ('{"id":6}', "open", "snapshot", '{"id":6,"due":"infinity","size":6}'),
    ]

    _configure(made, types={"on_unrepresentable": "null"})
    change_overrides(made.config.state, lambda orders: orders.replay_dead_letters([ITEMS, SHARDS]))
    made.run_once()  # the source is idle
    assert made.orders().replay == frozenset()
    found = made.compare()
    assert all(each.equal_but_held for each in found), found
    assert {str(each.table): each.held for each in found} == {
        **dict.fromkeys(held, 0),
        "public.cast_items": 1,
    }


def test_C08_rows_rejected_by_a_postgres_target_become_dead_letters_and_a_replay_makes_the_mirror_equal(
    spark: SparkSession, database: Database, target_database: Database, mirror_into: MirrorFactory
) -> None:
    database.execute(
        "CREATE TABLE items (id int PRIMARY KEY, size int); INSERT INTO items VALUES (1, 1), (2, 2), (3, 3)"
    )
    database.execute(
        "CREATE TABLE cast_items (id int PRIMARY KEY, size text); "
        "INSERT INTO cast_items VALUES (1, '1'), (2, 'large')"
    )
    rules = ["public.*", {"table": "public.cast_items", "columns": {"cast": {"size": "int"}}}]
    made = mirror_into("postgres", tables=rules, refused="dead_letters")
    assert not made.run_once().failed
    target_database.execute("ALTER TABLE copy_public.items ADD CONSTRAINT small CHECK (size < 100)")
    database.execute("INSERT INTO items VALUES (4, 400), (5, 5)")
    database.execute("UPDATE items SET size = 100 WHERE id = 1; UPDATE items SET size = 200 WHERE id = 2")
    assert not made.run_once().failed
    database.execute("UPDATE items SET size = 20 WHERE id = 2; DELETE FROM items WHERE id = 3")
    assert not made.run_once().failed
    assert target_database.query("SELECT id, size FROM copy_public.items ORDER BY id") == [
        (1, 1),
        (2, 20),
        (5, 5),
    ]
    assert _letters(spark, made, "public.items") == [
        ('{"id":"1"}', "open"),
        ('{"id":"2"}', "superseded"),
        ('{"id":"4"}', "open"),
    ]
    assert _letters(spark, made, "public.cast_items") == [('{"id":"2"}', "open")]
    assert verify_tables(spark, made.config).equal_but_held

    target_database.execute("ALTER TABLE copy_public.items DROP CONSTRAINT small")
    change_overrides(made.config.state, lambda orders: orders.replay_dead_letters([ITEMS]))
    made.run_once()
    assert target_database.query("SELECT id, size FROM copy_public.items ORDER BY id") == [
        (1, 100),
        (2, 20),
        (4, 400),
        (5, 5),
    ]
    assert {status for _, status in _letters(spark, made, "public.items")} == {"replayed", "superseded"}
    assert all(each.equal_but_held for each in made.compare())


def test_C08_a_parquet_log_lacks_exactly_its_dead_letters_until_they_are_replayed(
    spark: SparkSession, database: Database, mirror_into: MirrorFactory
) -> None:
    database.execute(
        "CREATE TABLE items (id int PRIMARY KEY, due date); "
        "INSERT INTO items VALUES (1, '2024-01-01'), (2, 'infinity')"
    )
    made = mirror_into("parquet", types={"on_unrepresentable": "error"}, refused="dead_letters")
    assert not made.run_once().failed
    database.execute(
        "INSERT INTO items VALUES (3, 'infinity'), (4, '2024-01-04'); "
        "UPDATE items SET due = '2024-01-03' WHERE id = 3"
    )
    assert not made.run_once().failed
    logged = [(1, "snapshot"), (3, "update_postimage"), (4, "insert")]
    assert sorted(map(tuple, made.rows("public.items", "id, _change_type"))) == logged
    assert _letters(spark, made, "public.items") == [('{"id":2}', "open"), ('{"id":3}', "open")]

    _configure(made, types={"on_unrepresentable": "null"})
    change_overrides(made.config.state, lambda orders: orders.replay_dead_letters([ITEMS]))
    made.run_once()
    assert sorted(map(tuple, made.rows("public.items", "id, _change_type"))) == sorted(
        [*logged, (2, "snapshot"), (3, "insert")]
    )


def _letters(spark: SparkSession, made: Mirror, table: str) -> list[tuple[str, str]]:
    """Their keys and their status."""
    letters = spark.read.parquet(str(made.config.sink.root / "penstock_dead_letters" / made.config.pipeline))
    return sorted((row["key"], row["status"]) for row in letters.where(letters["table"] == table).collect())
