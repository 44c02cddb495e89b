"""Money moves between two tables, and whoever reads them together sees every transfer whole."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import SparkSession

from penstock import read_consistent
from penstock.errors import EpochMissedError, NoTablesError
from penstock.pipeline.consistent import ConsistentTables
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.states import TableState
from penstock.position import Position
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.delta.sink import DeltaSink
from tests.fix_pipeline import MirrorFactory
from tests.fix_postgres import Database
from tests.integration.pipeline.test_online import DEADLINE_SECONDS, Running, running
from tests.waiting import wait_for

pytestmark = pytest.mark.spark
TOTAL = 200


def _total(tables: ConsistentTables) -> tuple[int, int]:
    checking, savings = (tables[f"public.{name}"].selectExpr("sum(amount) s").collect()[0]["s"] for name in ("checking", "savings"))
    return int(checking), int(savings)


def _wait_for_both(run: Running) -> None:
    """Until an epoch is recorded that both tables have been through."""
    config = run.mirror.config
    log = EpochLog(config.sink.root, config.pipeline)

    def is_recorded() -> bool:
        last = log.last()
        states = [] if last is None else [status.state for status in last.tables.values() if status.applied == last.position]
        return run.failure is not None or states == [TableState.STREAMING] * 2

    wait_for(is_recorded, "both tables to stream", lambda: run.pipeline.statuses, DEADLINE_SECONDS)


def test_a_transfer_that_is_applied_to_one_table_only_is_not_seen(
    database: Database, mirror: MirrorFactory, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("checking", "savings"):
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, amount int); INSERT INTO {name} VALUES (1, 100)")
    made = mirror()
    with pytest.raises(EpochMissedError):
        read_consistent(spark, made.path)
    applies, released = DeltaSink.apply, threading.Event()

    def apply(self: DeltaSink, target: Target, changes: TableChanges, end: Position) -> None:
        if target.table.name == "savings":
            assert released.wait(120)
        applies(self, target, changes, end)

    monkeypatch.setattr(DeltaSink, "apply", apply)
    with running(made) as run:
        _wait_for_both(run)
        before = read_consistent(spark, made.path)
        with database.transaction():
            database.execute("UPDATE checking SET amount = amount - 30")
            database.execute("UPDATE savings SET amount = amount + 30")
        wait_for(lambda: made.rows("public.checking", "amount")[0]["amount"] == 70, "one half of the transfer")
        assert made.rows("public.savings", "amount")[0]["amount"] == 100, "this is what tears"
        assert _total(read_consistent(spark, made.path)) == (100, 100)
        released.set()
        wait_for(lambda: _total(read_consistent(spark, made.path)) != (100, 100), "the other half")
        after = read_consistent(spark, made.path)
    assert _total(after) == (70, 130)
    assert _total(before) == (100, 100), "what was given out does not change"
    assert _total(read_consistent(spark, made.path, at=str(before.position))) == (100, 100)
    assert _total(read_consistent(spark, made.path, at=after.commit_time)) == (70, 130)
    assert set(read_consistent(spark, made.path, tables=["public.savings"])) == {"public.savings"}
    with pytest.raises(NoTablesError):
        read_consistent(spark, made.path, tables=["public.loans"])
    with pytest.raises(EpochMissedError):
        read_consistent(spark, made.path, at=datetime.now(UTC) - timedelta(days=1))


def test_no_reader_sees_a_torn_transfer_under_load(database: Database, mirror: MirrorFactory, spark: SparkSession) -> None:
    for name in ("checking", "savings"):
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, amount int); INSERT INTO {name} VALUES (1, 100)")
    made, done = mirror(), threading.Event()

    def transfer() -> None:
        with database.connect(autocommit=True) as connection:
            while not done.wait(0.005):
                connection.execute(
                    "WITH moved AS (UPDATE checking SET amount = amount - 1 RETURNING 1) UPDATE savings SET amount = amount + 1 FROM moved"
                )

    with running(made) as run:
        _wait_for_both(run)
        writer = threading.Thread(target=transfer)
        writer.start()
        try:
            seen: dict[Position, tuple[int, int]] = {}
            while len(seen) < 5:
                read = read_consistent(spark, made.path)
                seen[read.position] = _total(read)
        finally:
            done.set()
            writer.join()
    assert {sum(each) for each in seen.values()} == {TOTAL}
    assert len(set(seen.values())) > 1, "money did move"
