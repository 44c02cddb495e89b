"""Shards that go into one table, from the copy to the stream and back, into Delta and into Postgres."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.pipeline import roster
from penstock.pipeline.states import TableState
from penstock.pipeline.verification.verify import verify_tables
from penstock.schema import TableName
from tests.fix_pipeline import Mirror, MirrorFactory
from tests.fix_postgres import Database, PostgresServer
from tests.integration.pipeline.test_online import running
from tests.waiting import wait_for

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


def _in_lake(made: Mirror) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in made.rows("lake.orders", "_source, id, note, md5(big)")}


def _there(database: Database, *shards: str) -> set[tuple[Any, ...]]:
    return {(f"{shard}.orders", *row) for shard in shards for row in database.query(f"SELECT id, note, md5(big) FROM {shard}.orders")}


def _change(database: Database) -> None:
    """A truncate takes one shard's rows alone; a key change, its untouched values too, stays in its shard."""
    database.execute("UPDATE shard_1.orders SET note = 'gone soon' WHERE id = 2; UPDATE shard_2.orders SET id = 30 WHERE id = 3")
    database.execute("DELETE FROM shard_2.orders WHERE id = 1; TRUNCATE shard_1.orders; INSERT INTO shard_1.orders VALUES (2)")


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

    # A shard that comes while nobody runs joins: the table is copied anew by itself.
    _change(database)
    database.execute(SHARD.format("shard_3"))
    report = verify_tables(spark, made.config)  # which has the pipeline come to where it compares
    assert [(str(each.table), each.equal) for each in report.verdicts] == [("lake.orders", True)]
    assert held() == _there(database, "shard_1", "shard_2", "shard_3")


def test_K11_shards_that_are_altered_one_by_one_and_shards_that_come_while_the_pipeline_runs(
    database: Database, mirror: MirrorFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "_LOOK_SECONDS", 1.0)
    for shard in ("shard_1", "shard_2"):
        database.execute(SHARD.format(shard))
    made = mirror(tables=RULES)
    with running(made) as run:

        def follows(*shards: str) -> None:
            wait_for(lambda: _in_lake(made) == _there(database, *shards), "the rows of all shards", lambda: run.pipeline.statuses, 240)

        run.wait_for_state("lake.orders", TableState.STREAMING)
        _change(database)
        follows("shard_1", "shard_2")
        # As long as they differ there is nothing that they could make together.
        database.execute("ALTER TABLE shard_1.orders ADD more int DEFAULT 7; INSERT INTO shard_1.orders VALUES (1, 'new')")
        run.wait_for_state("lake.orders", TableState.FAILED)
        reason = run.pipeline.statuses[TableName("lake", "orders")].reason or ""
        assert "shard_1.orders has a column 'more', and shard_2.orders has not" in reason
        # Once they are alike it is copied anew by itself, with those that have come since.
        database.execute(SHARD.format("shard_3"))
        for shard in ("shard_2", "shard_3"):
            database.execute(f"ALTER TABLE {shard}.orders ADD more int DEFAULT 7")
        run.wait_for_state("lake.orders", TableState.STREAMING)
        database.execute("DELETE FROM shard_3.orders WHERE id = 1; INSERT INTO shard_1.orders VALUES (3, 'again')")
        follows("shard_1", "shard_2", "shard_3")
    assert {row["more"] for row in made.rows("lake.orders", "more")} == {7}
