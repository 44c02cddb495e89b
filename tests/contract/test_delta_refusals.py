"""Rows rejected by a Delta table (constraint, NOT NULL column): the table fails alone, or they become dead
letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.config.policies import RefusedPolicy
from penstock.pipeline.applier import EpochApplier
from penstock.pipeline.dead_letters.queue import DeadLetterQueue
from penstock.pipeline.dead_letters.store import DeadLetterStore
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.sinks.delta.commit import commit
from penstock.sinks.delta.state import load_state
from penstock.sinks.modes import Mode
from tests.support.contract.crash_table import FIRST
from tests.support.contract.delta_harness import DeltaHarness
from tests.support.contract.sink_harness import ITEMS
from tests.support.contract.sink_setups import NewSinkSetup
from tests.support.contract.two_tables import SECOND, TwoTables
from tests.support.delta_tables import InlineExecutors
from tests.support.pipeline.epochs import open_epochs
from tests.support.sinks.source import Value

pytestmark = pytest.mark.spark


@pytest.fixture
def two_tables(new_setup: NewSinkSetup) -> Iterator[TwoTables]:
    made = TwoTables(new_setup("delta"), Mode.MIRROR)
    yield made
    made.sink.close()


def test_K06_a_table_whose_constraint_is_broken_stops_alone(
    spark: SparkSession, two_tables: TwoTables
) -> None:
    second = f"delta.`{two_tables.sink.path(SECOND.name)}`"  # type: ignore[attr-defined]
    spark.sql(f"ALTER TABLE {second} ADD CONSTRAINT polite CHECK (code NOT LIKE '00000022%')")
    end = two_tables.work()
    two_tables.applier.apply(end)
    two_tables.assert_exact(end, end)
    slow = two_tables.applier.tables.statuses[SECOND.name]
    assert slow.state is TableState.STREAMING
    assert "PEN-4012" in (slow.reason or "")
    assert "by MERGE, about 40 times slower" in (slow.reason or "")
    assert "delta.constraints.polite" in (slow.reason or "")
    assert two_tables.applier.tables.statuses[FIRST.name].reason is None
    later = two_tables.work()
    two_tables.applier.apply(later)
    status = two_tables.applier.tables.statuses[SECOND.name]
    assert status.state is TableState.FAILED
    assert "PEN-3005" in (status.reason or "")
    assert "polite" in (status.reason or "")
    assert "00000022" not in (status.reason or ""), "the reason contains a row value"
    assert "DROP CONSTRAINT" in (status.remedy or "")
    assert two_tables.applier.tables.statuses[FIRST.name].state is TableState.STREAMING
    assert two_tables.log.last().position == later  # type: ignore[union-attr]
    two_tables.assert_exact(later, end)


def test_a_table_that_only_takes_appends_stops_alone(spark: SparkSession, two_tables: TwoTables) -> None:
    second = f"delta.`{two_tables.sink.path(SECOND.name)}`"  # type: ignore[attr-defined]
    spark.sql(f"ALTER TABLE {second} SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
    end = two_tables.work()
    two_tables.applier.apply(end)
    status = two_tables.applier.tables.statuses[SECOND.name]
    assert (status.state, two_tables.applier.tables.statuses[FIRST.name].state) == (
        TableState.FAILED,
        TableState.STREAMING,
    )
    assert "PEN-3003" in (status.reason or "")
    assert "APPEND_ONLY" in (status.reason or "")


def open_applier(harness: DeltaHarness, root: Path) -> tuple[EpochApplier, DeadLetterQueue]:
    store = DeadLetterStore(root / "lake", "shop")
    policy = RefusedPolicy.DEAD_LETTERS
    box = DeadLetterQueue(
        store,
        InlineExecutors(),
        policy_of=lambda _: policy,
        mode_of=lambda _: Mode.MIRROR,
        reject_inexact=False,
    )
    applier = open_epochs(harness.sink, root, pipeline="shop", dead_letters=box).applier
    target = harness.target()
    applier.tables.start(
        {ITEMS: target}, {ITEMS: TableStatus(TableState.CATCHING_UP, target.applied, target.applied)}
    )
    return applier, box


def take_no_nulls(path: Path, column: str) -> None:
    """A constraint that Spark does not add to an existing table, though other writers may."""
    state = load_state(path)
    assert state is not None
    fields = [
        {**field, "nullable": field["name"] != column and field["nullable"]}
        for field in state.metadata.fields
    ]
    metadata = {**state.metadata.action, "schemaString": json.dumps({"type": "struct", "fields": fields})}
    assert commit(path, state.version + 1, [{"metaData": metadata}])


def shown(box: DeadLetterQueue) -> list[tuple[Any, ...]]:
    return [(each["key"], each["status"], each["code"]) for each in box.store.load().to_pylist()]


def test_C08_rows_that_violate_a_constraint_are_dead_letters_and_a_replay_writes_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    harness = DeltaHarness(tmp_path, spark)
    source, at = harness.source, harness.at
    harness.copy()
    path = harness.open().path(ITEMS)
    take_no_nulls(path, "size")
    spark.sql(f"ALTER TABLE delta.`{path}` ADD CONSTRAINT polite CHECK (note NOT LIKE 'bad%')")
    spark.sql(f"ALTER TABLE delta.`{path}` ADD CONSTRAINT small CHECK (size <> 'large' OR note <> 'note 4')")
    applier, box = open_applier(harness, tmp_path)
    for number in range(100, 120):
        source.insert(harness.item(number, "bad" if number % 10 == 3 else "fine", "1"))
    source.update(at(1), {"note": Value("better")})
    source.update(at(1), {"note": Value("bad again")})
    source.update(at(2), {"size": Value(None)})
    source.delete(at(3))
    source.update(
        at(4), {"size": Value("large")}, ["note"]
    )  # rejected because of rows that stay in the target
    source.update(at(5), {"size": Value("large")}, ["note"])
    applier.apply(harness.commit())
    assert applier.tables.statuses[ITEMS].state is TableState.STREAMING
    assert shown(box) == [(f'{{"id":{number}}}', "open", "PEN-3005") for number in (103, 113, 1, 2, 4)]
    reasons = [each["reason"] for each in box.store.load().to_pylist()]
    assert [reason.split("'")[1] for reason in reasons] == [
        "polite",
        "polite",
        "polite",
        "size NOT NULL",
        "small",
    ]
    rows = {row["id"].typed: (row["note"].typed, row["size"].typed) for row in harness.rows()}
    assert len(rows) == 9 - 1 + 20 - 2
    assert rows[1] == ("better", "1.50"), "the change before the one that was refused"
    assert (rows[2], rows[4], rows[5]) == (("note 2", "2.50"), ("note 4", "4.50"), ("note 5", "large"))

    for constraint in ("polite", "small"):
        spark.sql(f"ALTER TABLE delta.`{path}` DROP CONSTRAINT {constraint}")
    spark.sql(f"ALTER TABLE delta.`{path}` ALTER COLUMN size DROP NOT NULL")
    box.order_replay(ITEMS)
    source.insert(harness.item(500, "fine", "1"))
    applier.apply(harness.commit())
    assert {status for _, status, _ in shown(box)} == {"replayed"}
    assert harness.rows() == source.sorted_rows()
