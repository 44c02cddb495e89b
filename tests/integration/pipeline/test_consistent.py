"""Transfers between two tables: a consistent read of both sees every transfer whole."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock import read_consistent
from penstock.config.model import PipelineConfig
from penstock.errors import ConfigError, EpochMissedError, NoTablesError, Recovery
from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.table_states import TableState
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.delta.sink import DeltaSink
from penstock.sinks.iceberg.sink import IcebergSink
from penstock.sinks.parquet.sink import ParquetSink
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.pipeline.running import DEADLINE_SECONDS, Running, running
from tests.support.waiting import wait_for

pytestmark = pytest.mark.spark
TOTAL = 200
SINKS: dict[str, type[Sink]] = {"delta": DeltaSink, "iceberg": IcebergSink, "parquet": ParquetSink}
every_kind = pytest.mark.parametrize("kind", SINKS)


def _open_accounts(database: Database) -> None:
    for name in ("checking", "savings"):
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, amount int); INSERT INTO {name} VALUES (1, 100)"
        )


def _totals(reads: Sequence[Mapping[str, DataFrame]]) -> list[tuple[int, int]]:
    """The total of either account in each read, in one job. In a log the last row has it."""
    frames = [
        tables[f"public.{name}"].selectExpr(
            f"{at} AS at", f"'{name}' AS name", "amount", f"{_place(tables)} AS place"
        )
        for at, tables in enumerate(reads)
        for name in ("checking", "savings")
    ]
    rows = (
        reduce(DataFrame.unionByName, frames)
        .groupBy("at", "name")
        .agg(F.expr("coalesce(max_by(amount, place), sum(amount))").alias("amount"))
        .collect()
    )
    found = {(row["at"], row["name"]): int(row["amount"]) for row in rows}
    return [(found[at, "checking"], found[at, "savings"]) for at in range(len(reads))]


def _place(tables: Mapping[str, DataFrame]) -> str:
    return (
        "struct(_commit_version, _ordinal)"
        if "_commit_version" in tables["public.savings"].columns
        else "CAST(NULL AS struct<version: bigint, ordinal: bigint>)"
    )


def _total(tables: Mapping[str, DataFrame]) -> tuple[int, int]:
    return _totals([tables])[0]


def _now(made: Mirror) -> tuple[int, int]:
    """The totals seen by a reader that reads one table after the other."""
    sink = made.open_sink()
    return _total({name: sink.read(TableName.parse(name)) for name in ("public.checking", "public.savings")})


def _is_common(epoch: Epoch) -> bool:
    """Whether both tables have applied it."""
    return [status.state for status in epoch.tables.values() if status.applied == epoch.position] == [
        TableState.STREAMING
    ] * 2


def _common_epochs(config: PipelineConfig) -> list[Epoch]:
    found: list[Epoch] = []
    EpochLog(config.sink.root, config.pipeline).newest(lambda epoch: bool(found.append(epoch)))  # type: ignore[func-returns-value]
    return [epoch for epoch in found if _is_common(epoch)]


def _wait_for_both(run: Running) -> None:
    """Wait until an epoch is recorded that both tables have applied."""
    config = run.mirror.config
    log = EpochLog(config.sink.root, config.pipeline)

    def is_recorded() -> bool:
        last = log.last()
        return run.failure is not None or (last is not None and _is_common(last))

    wait_for(is_recorded, "both tables to stream", lambda: run.pipeline.statuses, DEADLINE_SECONDS)


@every_kind
def test_a_transfer_that_is_applied_to_one_table_only_is_not_seen(
    database: Database,
    mirror_into: MirrorFactory,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    _open_accounts(database)
    made = mirror_into(kind)
    with pytest.raises(EpochMissedError):
        read_consistent(spark, made.path)
    applies, released = SINKS[kind].apply, threading.Event()

    def apply(self: Sink, target: Target, changes: TableChanges, end: Position) -> None:
        if target.table.name == "savings":
            assert released.wait(120)
        applies(self, target, changes, end)

    monkeypatch.setattr(SINKS[kind], "apply", apply)
    with running(made) as run:
        _wait_for_both(run)
        before = read_consistent(spark, made.path)
        with database.transaction():
            database.execute("UPDATE checking SET amount = amount - 30")
            database.execute("UPDATE savings SET amount = amount + 30")
        wait_for(lambda: _now(made)[0] == 70, "one half of the transfer")
        assert _now(made) == (70, 100), "an inconsistent read"
        assert _total(read_consistent(spark, made.path)) == (100, 100)
        released.set()
        wait_for(lambda: _total(read_consistent(spark, made.path)) != (100, 100), "the other half")
        after = read_consistent(spark, made.path)
    assert _total(after) == (70, 130)
    assert _total(before) == (100, 100), "returned rows do not change"
    assert _total(read_consistent(spark, made.path, at=str(before.position))) == (100, 100)
    assert _total(read_consistent(spark, made.path, at=after.commit_time)) == (70, 130)
    assert set(read_consistent(spark, made.path, tables=["public.savings"])) == {"public.savings"}
    with pytest.raises(NoTablesError):
        read_consistent(spark, made.path, tables=["public.loans"])
    with pytest.raises(EpochMissedError):
        read_consistent(spark, made.path, at=datetime.now(UTC) - timedelta(days=1))


@every_kind
def test_no_reader_sees_a_torn_transfer_under_load_nor_in_epochs_that_were_recorded(
    database: Database, mirror_into: MirrorFactory, spark: SparkSession, kind: str
) -> None:
    """Files are rewritten during the test, in sinks that do so."""
    _open_accounts(database)
    done = threading.Event()
    made = mirror_into(kind, trigger="1 second", maintenance={"compact_after": 3, "checkpoint_after": 5})

    def transfer() -> None:
        with database.connect(autocommit=True) as connection:
            while not done.wait(0.005):
                connection.execute(
                    "WITH moved AS (UPDATE checking SET amount = amount - 1 RETURNING 1) UPDATE savings "
                    "SET amount = amount + 1 FROM moved"
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
    epochs = _common_epochs(made.config)
    assert len(epochs) >= len(seen)
    epochs = epochs[:: -(-len(epochs) // 10)]  # newest first; Spark takes a second to open a version
    reads = [read_consistent(spark, made.path, at=epoch.position) for epoch in epochs]
    assert [read.position for read in reads] == [epoch.position for epoch in epochs]
    totals = _totals(reads)
    assert {sum(each) for each in totals} == {TOTAL}
    assert len(set(totals)) > 1


def test_tables_in_postgres_are_refused_with_a_fix_that_works(
    database: Database, target_database: Database, mirror: MirrorFactory, spark: SparkSession
) -> None:
    _open_accounts(database)
    made = mirror(sink={"postgres": {"dsn": target_database.dsn, "schema_prefix": "copy_"}})
    made.run_once()
    ((before,),) = database.query("SELECT pg_current_wal_lsn()::text")
    database.execute("UPDATE checking SET amount = amount - 30; UPDATE savings SET amount = amount + 30")
    made.run_once()
    last = EpochLog(made.config.sink.root, made.config.pipeline).last()
    assert last is not None
    with pytest.raises(ConfigError) as refused:
        read_consistent(spark, made.path)
    hint = refused.value.hint or ""
    assert refused.value.recovery is Recovery.OPERATOR
    assert "in one transaction" in hint
    assert "isolation level repeatable read" in hint
    assert "penstock.applied" in hint
    with psycopg.connect(target_database.dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reached = connection.execute('SELECT DISTINCT "position"::text FROM penstock.applied').fetchall()
        amounts = connection.execute(
            "SELECT c.amount, s.amount FROM copy_public.checking c, copy_public.savings s"
        ).fetchall()
    ((position,),) = reached
    assert Position.parse(before) < Position.parse(position) <= last.position, (
        "the end of the epoch that applied the commit"
    )
    assert amounts == [(70, 130)]
