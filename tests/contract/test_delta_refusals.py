"""Rows that a Delta table refuses, by a constraint or by a column that takes no nulls: the table stops alone, or they are put aside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.pipeline.apply import EpochApplier
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.letters.box import LetterBox
from penstock.pipeline.letters.policy import RefusedPolicy
from penstock.pipeline.letters.store import LetterStore
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.states import TableState, TableStatus
from penstock.sinks.delta.commit import commit
from penstock.sinks.delta.state import load_state
from penstock.sinks.layout import Mode
from tests.contract.places import NewPlace
from tests.contract.sink_harness import ITEMS
from tests.contract.test_delta_sink import DeltaHarness
from tests.contract.test_matrix_faults import SECOND, House
from tests.contract.workshop import FIRST
from tests.delta_tables import InlineExecutors
from tests.integration.sinks.source import Value

pytestmark = pytest.mark.spark


@pytest.fixture
def house(new_place: NewPlace) -> Iterator[House]:
    made = House(new_place("delta"), Mode.MIRROR)
    yield made
    made.sink.close()


def test_K06_a_table_whose_constraint_is_broken_stops_alone(spark: SparkSession, house: House) -> None:
    second = f"delta.`{house.sink.path(SECOND.name)}`"  # type: ignore[attr-defined]
    spark.sql(f"ALTER TABLE {second} ADD CONSTRAINT polite CHECK (code NOT LIKE '00000022%')")
    end = house.work()
    house.applier.apply(end)
    house.assert_exact(end, end)
    slow = house.applier.statuses[SECOND.name]
    assert slow.state is TableState.STREAMING
    assert "PEN-4012" in (slow.reason or "")
    assert "by MERGE, about 40 times slower" in (slow.reason or "")
    assert "delta.constraints.polite" in (slow.reason or "")
    assert house.applier.statuses[FIRST.name].reason is None
    later = house.work()
    house.applier.apply(later)
    status = house.applier.statuses[SECOND.name]
    assert status.state is TableState.FAILED
    assert "PEN-3005" in (status.reason or "")
    assert "polite" in (status.reason or "")
    assert "00000022" not in (status.reason or ""), "what stands in the row is not told"
    assert "DROP CONSTRAINT" in (status.remedy or "")
    assert house.applier.statuses[FIRST.name].state is TableState.STREAMING
    assert house.log.last().position == later  # type: ignore[union-attr]
    house.assert_exact(later, end)


def test_a_table_that_only_takes_appends_stops_alone(spark: SparkSession, house: House) -> None:
    second = f"delta.`{house.sink.path(SECOND.name)}`"  # type: ignore[attr-defined]
    spark.sql(f"ALTER TABLE {second} SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
    end = house.work()
    house.applier.apply(end)
    status = house.applier.statuses[SECOND.name]
    assert (status.state, house.applier.statuses[FIRST.name].state) == (TableState.FAILED, TableState.STREAMING)
    assert "PEN-3003" in (status.reason or "")
    assert "APPEND_ONLY" in (status.reason or "")


def open_applier(harness: DeltaHarness, root: Path) -> tuple[EpochApplier, LetterBox]:
    store = LetterStore(root / "lake", "shop")
    policy = RefusedPolicy.DEAD_LETTERS
    box = LetterBox(store, InlineExecutors(), policy_of=lambda _: policy, mode_of=lambda _: Mode.MIRROR, refuse_inexact=False)
    log, observer = EpochLog(root / "lake", "shop"), PipelineObserver()
    applier = EpochApplier(harness.sink, log, root / "spool", consumer="shop", system="1/1", observer=observer, letters=box)
    target = harness.target()
    applier.adopt({ITEMS: target}, {ITEMS: TableStatus(TableState.CATCHING_UP, target.applied, target.applied)})
    return applier, box


def take_no_nulls(path: Path, column: str) -> None:
    """What Spark does not do to a table that is there, though others may."""
    state = load_state(path)
    assert state is not None
    fields = [{**field, "nullable": field["name"] != column and field["nullable"]} for field in state.metadata.fields]
    metadata = {**state.metadata.action, "schemaString": json.dumps({"type": "struct", "fields": fields})}
    assert commit(path, state.version + 1, [{"metaData": metadata}])


def shown(box: LetterBox) -> list[tuple[Any, ...]]:
    return [(each["key"], each["status"], each["code"]) for each in box.store.load().to_pylist()]


def test_C08_rows_that_break_a_rule_of_the_table_are_letters_and_a_replay_brings_them(spark: SparkSession, tmp_path: Path) -> None:
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
    source.update(at(4), {"size": Value("large")}, ["note"])  # which is refused by what stays in the target
    source.update(at(5), {"size": Value("large")}, ["note"])
    applier.apply(harness.commit())
    assert applier.statuses[ITEMS].state is TableState.STREAMING
    assert shown(box) == [(f'{{"id":{number}}}', "open", "PEN-3005") for number in (103, 113, 1, 2, 4)]
    reasons = [each["reason"] for each in box.store.load().to_pylist()]
    assert [reason.split("'")[1] for reason in reasons] == ["polite", "polite", "polite", "size NOT NULL", "small"]
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
