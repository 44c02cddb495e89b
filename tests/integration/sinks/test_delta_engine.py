"""Delta tables that Penstock commits to, used by Spark, OPTIMIZE, VACUUM, time travel, checkpoints and other
writers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import SchemaChangedError, SinkError, TargetRewoundError
from penstock.position import Position
from penstock.schema import GEOMETRY_TYPE, Column
from penstock.sinks.base import MaintenanceSettings
from penstock.sinks.dataframes import load_changes
from penstock.sinks.delta import checkpoints as delta_checkpoints
from penstock.sinks.delta import sink as delta
from penstock.sinks.delta.epoch import DeltaCommit
from penstock.sinks.delta.sink import DeltaSink
from penstock.sinks.delta.state import load_state, newest_checkpoint
from penstock.sinks.executors import Executors
from penstock.sinks.modes import VALID_FROM, VALID_FROM_TIME, Layout, Mode
from tests.support.property.source_model import SourceModel, canonical
from tests.support.sinks.items import ITEMS, at, item
from tests.support.sinks.mirror import PIPELINE, Mirror
from tests.support.sinks.source import NULL, Source, Value, time_of

EPOCH = "PENSTOCK EPOCH"
"""The operation in the table history if no MERGE was needed."""


@pytest.fixture
def items(spark: SparkSession, tmp_path: Path) -> Mirror:
    return Mirror(spark, tmp_path, Source(ITEMS, [item(key, f"note {key}") for key in range(1, 200)]))


def change(items: Mirror, number: int) -> None:
    """Rows of every file are deleted and inserted."""
    source = items.source
    for key in range(1, 200, 40):
        source.update(at(key), {"note": Value(f"epoch {number}")})
    source.delete(at(10 + number))
    source.insert(item(1000 + number))
    source.commit()
    items.follow()
    assert items.operation() == EPOCH


def kept(spark: SparkSession, items: Mirror, settings: MaintenanceSettings) -> DeltaSink:
    items.sink = DeltaSink(spark, items.path.parents[1], PIPELINE, maintenance=settings)
    return items.sink


def test_optimize_vacuum_checkpoints_and_time_travel_work_on_our_commits(
    spark: SparkSession, items: Mirror
) -> None:
    place = f"delta.`{items.path}`"
    states = {}
    for number in range(3):
        change(items, number)
        states[len(items.commits()) - 1] = items.source.sorted_rows()
    kept(spark, items, MaintenanceSettings(checkpoint_after=4)).maintain(ITEMS.name)
    assert newest_checkpoint(items.path) >= 3

    rust = QueryBuilder().register("t", DeltaTable(items.path)).execute("SELECT id, note FROM t").read_all()
    expected = {(row["id"].typed, row["note"].typed) for row in items.source.rows.values()}
    assert {tuple(row.values()) for row in pa.table(rust).to_pylist()} == expected

    spark.sql(f"OPTIMIZE {place}").collect()
    change(items, 3)
    for version, rows in states.items():
        then = spark.read.format("delta").option("versionAsOf", version).load(str(items.path)).toArrow()
        assert {row["id"]: row["note"] for row in then.to_pylist()} == {
            row["id"].typed: row["note"].typed for row in rows
        }
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    spark.conf.set(
        "spark.sql.sources.parallelPartitionDiscovery.parallelism", "2"
    )  # otherwise there are ten thousand tasks
    spark.sql(f"VACUUM {place} RETAIN 0 HOURS").collect()
    change(items, 4)
    assert items.sink.version_at(ITEMS.name, Position.of(items.source.position)) == len(items.commits()) - 1

    # Our reader starts from a checkpoint that Delta wrote, with the same result as from the whole log.
    delta_checkpoints.write_checkpoint_by_delta(spark, items.path)
    version = newest_checkpoint(items.path)
    before = load_state(items.path)
    for old in (items.path / "_delta_log").glob("*.json"):
        if int(old.name[:20]) < version:
            old.unlink()
    after = load_state(items.path)
    assert before is not None
    assert after is not None
    assert (after.version, after.files.keys(), after.transactions) == (
        before.version,
        before.files.keys(),
        before.transactions,
    )
    change(items, 5)


def test_a_table_maintained_between_epochs_equals_the_source_for_every_reader(
    spark: SparkSession, items: Mirror
) -> None:
    sink = kept(
        spark,
        items,
        MaintenanceSettings(compact_after=3, checkpoint_after=0, keep_seconds=0.0, vacuum_every_seconds=0.0),
    )
    for number in range(3):
        items.source.update(at(1 + number), {"note": Value(f"epoch {number}")})
        items.source.insert(item(1000 + number))
        items.source.commit()
        items.follow()
    for _ in range(2):  # the first run only records the time
        sink.maintain(ITEMS.name)
    change(items, 3)
    operations = [
        action["commitInfo"]["operation"]
        for commit in items.commits()
        for action in commit
        if "commitInfo" in action
    ]
    assert operations.count(EPOCH) == 4
    assert operations.count("PENSTOCK COMPACTION") == 1
    assert not any(each.startswith("VACUUM") for each in operations), "commits that are in the way of epochs"
    state = load_state(items.path)
    assert state is not None
    assert len(state.files) == 2
    there = [file for file in items.path.iterdir() if file.is_file() and file.suffix in (".parquet", ".bin")]
    assert len(there) == 3, "files that no version needs are deleted"


@pytest.mark.parametrize(
    "statement",
    ["SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')"],
)
def test_a_table_that_asks_for_more_than_we_know_is_left_to_delta(
    spark: SparkSession, items: Mirror, statement: str
) -> None:
    spark.sql(f"ALTER TABLE delta.`{items.path}` {statement}")
    items.source.update(at(1), {"note": Value("merged")})
    items.source.commit()
    items.follow()
    assert items.operation() == "MERGE"


def test_K01_an_abandoned_run_does_not_repeat_the_rows_of_its_successor(
    spark: SparkSession, items: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta would write inserts as an append, which uses the table's current schema."""
    spark.sql(f"ALTER TABLE delta.`{items.path}` SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')")
    target, fence = items.target(), items.reached
    positions = []
    for key in (1000, 1001):
        items.source.insert(item(key))
        items.source.commit()
        items.spool()
        positions.append(items.source.position)
    first, both = items.changes(fence, positions[0]), items.changes(fence, positions[1])
    assert first is not None
    assert both is not None

    def late(*arguments: Any) -> DataFrame:
        monkeypatch.undo()
        DeltaSink(spark, items.path.parents[1], PIPELINE).apply(target, first, Position.of(positions[0]))
        return load_changes(*arguments)

    monkeypatch.setattr(delta, "load_changes", late)
    with pytest.raises(SinkError, match="another run of the pipeline"):
        items.sink.apply(target, both, Position.of(positions[1]))
    items.sink.apply(target, both, Position.of(positions[1]))
    assert items.rows() == items.source.sorted_rows()


def test_K09_a_restored_table_continues_from_the_rows_it_then_holds(
    spark: SparkSession, items: Mirror
) -> None:
    change(items, 0)
    version, then = len(items.commits()) - 1, items.source.position
    change(items, 1)
    target = items.target()
    spark.sql(f"RESTORE TABLE delta.`{items.path}` TO VERSION AS OF {version}").collect()
    items.source.insert(item(2000))
    items.source.commit()
    items.spool()
    last = items.changes(items.reached, items.source.position)
    assert last is not None
    with pytest.raises(TargetRewoundError, match=f"only up to {Position.of(then)}"):
        items.sink.apply(target, last, Position.of(items.source.position))
    assert items.target().applied == Position.of(then), "as a restart finds it"
    delta_checkpoints.write_checkpoint_by_delta(spark, items.path)
    items.sink = DeltaSink(spark, items.path.parents[1], PIPELINE)
    items.apply(then, items.source.position)
    assert items.rows() == items.source.sorted_rows()


def test_K09_an_epoch_meets_an_optimize_and_is_worked_out_again(
    spark: SparkSession, items: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happens between reading the table and committing, the worst moment."""
    change(items, 0)
    tried: list[bool] = []
    apply = DeltaCommit.apply

    def meanwhile(epoch: DeltaCommit, executors: Executors) -> bool:
        if not tried:
            spark.sql(f"OPTIMIZE delta.`{items.path}`").collect()
        tried.append(apply(epoch, executors))
        return tried[-1]

    monkeypatch.setattr(DeltaCommit, "apply", meanwhile)
    change(items, 1)
    assert tried == [False, True]


def test_structs_of_a_table_with_mapped_names_come_through_snapshot_and_epochs(
    spark: SparkSession, tmp_path: Path
) -> None:
    shapes = replace(
        ITEMS, columns=(*ITEMS.columns, Column("a name", pa.string(), 25), Column("shape", GEOMETRY_TYPE, 0))
    )
    row = item(1) | {"a name": Value("x"), "shape": Value({"srid": 4326, "wkb": b"\x01"})}
    mirror = Mirror(spark, tmp_path, Source(shapes, [row, row | {"id": Value(2)}]))
    assert mirror.rows() == mirror.source.sorted_rows()
    mirror.source.update(at(1), {"note": Value("kept")}, ["shape"])
    mirror.source.commit()
    mirror.follow()
    assert mirror.operation() == EPOCH


@pytest.mark.parametrize("mode", [Mode.SOFT_DELETE, Mode.HISTORY, Mode.APPEND])
def test_a_table_of_any_mode_equals_the_model(spark: SparkSession, tmp_path: Path, mode: Mode) -> None:
    source = SourceModel(ITEMS, [item(key, f"note {key}") for key in range(1, 6)])
    target = Mirror(spark, tmp_path, source, DeltaSink(spark, tmp_path / "lake", PIPELINE, lambda _: mode))
    source.update(at(1), {"size": NULL}, ["note"])
    source.delete(at(2))
    source.insert(item(9))
    source.commit()
    source.update(at(3), {"id": Value(30)}, ["note"])
    source.insert(item(2, "again"))
    source.commit()
    target.spool()
    target.apply(target.reached, source.position)
    layout = Layout(target.target().schema, ITEMS.key, mode)
    assert target.target().mode is mode
    found = target.sink.read(ITEMS.name).toArrow()
    assert found.column_names == layout.schema.names
    rows = found.to_pylist()
    if mode is Mode.APPEND:
        kinds = [
            row["_change_type"]
            for row in sorted(rows, key=lambda row: (row["_commit_version"], row["_ordinal"]))
        ]
        assert kinds == ["snapshot"] * 5 + [
            "update_postimage",
            "delete",
            "insert",
            "delete",
            "insert",
            "insert",
        ]
        return
    if mode is Mode.HISTORY:  # the fence of a real snapshot has the current time, unlike that of the model
        rows = [row | {VALID_FROM_TIME: time_of(row[VALID_FROM])} for row in rows]
    assert canonical(rows, layout) == canonical(source.expected(mode, source.position), layout)
    refused = DeltaSink(spark, tmp_path / "lake", PIPELINE)
    changes = target.changes(source.fence, source.position)
    assert changes is not None
    with pytest.raises(SchemaChangedError, match="has the mode"):
        refused.apply(target.target(), changes, Position.of(source.position))
