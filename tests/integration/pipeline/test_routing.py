"""Shards routed into one Postgres table, from snapshot to stream and back. Lakes are tested with schema
changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.pipeline.verify.verify import verify_tables
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database, PostgresServer

SHARD = """
    CREATE SCHEMA {0};
    CREATE TABLE {0}.orders (id int PRIMARY KEY, note text, big text);
    ALTER TABLE {0}.orders ALTER big SET STORAGE EXTERNAL;
    INSERT INTO {0}.orders SELECT g, '{0} ' || g, repeat(md5('{0}' || g), 100) FROM generate_series(1, 5) g
"""
RULES = [{"match": "shard_*.orders", "into": "lake.orders"}]


@pytest.fixture
def target(postgres_server: PostgresServer) -> Iterator[Database]:
    created = postgres_server.create_database()
    yield created
    created.close()
    postgres_server.drop_database(created.name)


def _there(database: Database, *shards: str) -> set[tuple[Any, ...]]:
    return {
        (f"{shard}.orders", *row)
        for shard in shards
        for row in database.query(f"SELECT id, note, md5(big) FROM {shard}.orders")
    }


def _change(database: Database) -> None:
    """A truncate removes the rows of one shard only. After a key change the row stays in its shard, with its
    unchanged values.
    """
    database.execute(
        "UPDATE shard_1.orders SET note = 'gone soon' WHERE id = 2; "
        "UPDATE shard_2.orders SET id = 30 WHERE id = 3"
    )
    database.execute(
        "DELETE FROM shard_2.orders WHERE id = 1; TRUNCATE shard_1.orders; "
        "INSERT INTO shard_1.orders VALUES (2)"
    )


def test_K11_the_same_keys_in_different_shards_are_different_rows_of_one_table(
    spark: SparkSession, database: Database, target: Database, mirror: MirrorFactory
) -> None:
    for shard in ("shard_1", "shard_2"):
        database.execute(SHARD.format(shard))
    sink = {"postgres": {"dsn": target.dsn}}
    mirror(tables=["shard_1.*"], sink=sink).run_once()
    made = mirror(tables=RULES, sink=sink)  # a table that was mirrored by itself is a member from now on

    def held() -> set[tuple[Any, ...]]:
        return set(target.query("SELECT _source, id, note, md5(big) FROM lake.orders"))

    assert made.run_once().tables.keys() == {"lake.orders"}
    assert held() == _there(database, "shard_1", "shard_2")

    # A shard that is added while no pipeline runs joins: the table is resynced automatically.
    _change(database)
    database.execute(SHARD.format("shard_3"))
    assert (
        not made.run_once().failed
    )  # until then the table is being copied, and `verify` does not compare it
    report = verify_tables(spark, made.config)
    assert [(str(each.table), each.equal) for each in report.verdicts] == [("lake.orders", True)]
    assert held() == _there(database, "shard_1", "shard_2", "shard_3")
