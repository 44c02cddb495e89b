"""Commits of the Delta sink: contents, refusals, and how the sink resumes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock.errors import SchemaChangedError, SinkRefusedError, TargetForeignError, TargetRewoundError
from penstock.position import Position
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.base import directory_name
from penstock.sinks.delta.sink import DeltaSink
from tests.support.sinks.items import ITEMS, at, item
from tests.support.sinks.mirror import PIPELINE, Mirror
from tests.support.sinks.source import Source, Value

NAME = ITEMS.name


@pytest.fixture
def items(spark: SparkSession, tmp_path: Path) -> Mirror:
    return Mirror(spark, tmp_path, Source(ITEMS, [item(key) for key in range(1, 10)]))


def test_every_commit_of_rows_holds_the_position_too(items: Mirror) -> None:
    source = items.source
    source.insert(item(20))
    source.commit()
    items.follow()
    assert items.operation() == "PENSTOCK EPOCH"
    source.update(at(20), {"note": Value("second")})
    source.delete(at(1))
    source.commit()
    items.follow()
    assert items.operation() == "PENSTOCK EPOCH"
    source.truncate()
    source.insert(item(1))
    source.commit()
    items.follow()
    found = []
    for actions in items.commits():
        if any("add" in action or "remove" in action for action in actions):
            found.append([action["txn"]["version"] for action in actions if "txn" in action])
    assert found == [[source.fence], *([each.position] for each in source.log)]


def test_an_epoch_of_inserts_is_an_append(items: Mirror) -> None:
    items.source.insert(item(20))
    items.source.insert(item(21))
    items.source.commit()
    items.follow()
    actions = items.commits()[-1]
    [info] = [action["commitInfo"] for action in actions if "commitInfo" in action]
    assert info["isBlindAppend"]
    assert not any("remove" in action for action in actions)


def test_an_epoch_without_net_changes_still_moves_the_position(items: Mirror) -> None:
    """Otherwise the next start would request that range again."""
    source = items.source
    source.insert(item(20))
    source.delete(at(20))
    source.commit()
    items.follow()
    source.insert(item(30))
    source.update(at(30), {"note": Value("x")}, ["size"])
    source.update(at(30), {"id": Value(31)}, ["note"])
    source.delete(at(31))
    source.commit()
    items.follow()
    assert items.target().applied == Position.of(source.position)
    source.insert(item(40))
    first = source.commit()
    source.insert(item(41))
    second = source.commit()
    items.spool()
    for end in (first, first + 1, second):
        items.apply(items.reached, end)
    assert items.rows() == source.sorted_rows()


def test_a_table_begun_and_not_finished_has_no_position(spark: SparkSession, tmp_path: Path) -> None:
    sink = DeltaSink(spark, tmp_path, PIPELINE)
    assert sink.load_target(NAME) is None
    place = sink.begin_snapshot(ITEMS, Position.of(100))
    target = sink.load_target(NAME)
    assert target is not None
    assert target.applied is None
    leftover = Path(place.directory) / f"{place.prefix}-000000.parquet"
    leftover.write_bytes(b"half a file")
    sink.begin_snapshot(ITEMS, Position.of(200))
    assert not leftover.exists()


def test_a_table_begun_and_not_finished_follows_the_source_when_it_is_begun_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    first = replace(ITEMS, oid=1, columns=ITEMS.columns[:2])
    DeltaSink(spark, tmp_path / "lake", PIPELINE).begin_snapshot(first, Position.of(50))
    odd = replace(
        ITEMS,
        columns=(*ITEMS.columns, Column("a name, of {several} words", pa.string(), 25)),
        key=("id", "note"),
    )
    row = item(1) | {"a name, of {several} words": Value("read back")}
    mirror = Mirror(spark, tmp_path, Source(odd, [row]))
    assert mirror.rows() == [row]
    target = mirror.target()
    assert (target.source_oid, target.key, target.applied) == (
        odd.oid,
        odd.key,
        Position.of(mirror.source.fence),
    )


def test_a_restarted_copy_first_removes_the_old_position(items: Mirror) -> None:
    source = items.source
    source.insert(item(20))
    fence = source.commit()
    items.follow()
    items.sink.begin_snapshot(ITEMS, Position.of(fence))
    assert items.target().applied is None
    assert items.rows() == []
    items.source.fence = items.reached = fence
    items.snapshot()
    assert items.target().applied == Position.of(fence)
    assert items.rows() == source.sorted_rows()
    source.update(at(20), {"note": Value("x")})
    source.commit()
    items.follow()


def test_a_snapshot_without_rows_is_an_empty_table_with_its_position(
    spark: SparkSession, tmp_path: Path
) -> None:
    mirror = Mirror(spark, tmp_path, Source(ITEMS))
    assert mirror.rows() == []
    assert mirror.target().applied == Position.of(mirror.source.fence)
    assert mirror.target().schema == pa.schema(
        [pa.field(column.name, column.arrow_type) for column in ITEMS.columns]
    )


@pytest.mark.parametrize(
    "changed",
    [
        replace(ITEMS, oid=1),
        replace(ITEMS, key=("id", "note")),
        replace(ITEMS, columns=(*ITEMS.columns, Column("more", pa.int32(), 23))),
        replace(ITEMS, columns=(*ITEMS.columns[:2], Column("size", pa.decimal128(10, 2), 1700))),
    ],
    ids=["oid", "key", "more columns", "another type"],
)
def test_changes_under_another_schema_are_refused(items: Mirror, changed: TableSchema) -> None:
    items.source.insert(item(20))
    items.source.commit()
    items.spool()
    changes = items.changes(items.reached, items.source.position)
    assert changes is not None
    slices = [replace(slice, file=replace(slice.file, schema=changed)) for slice in changes.slices]
    commits = len(items.commits())
    with pytest.raises(SchemaChangedError):
        items.sink.apply(items.target(), replace(changes, slices=slices), Position.of(items.source.position))
    assert len(items.commits()) == commits


def test_k10_a_table_of_another_pipeline_is_refused(
    spark: SparkSession, tmp_path: Path, items: Mirror
) -> None:
    other = DeltaSink(spark, tmp_path / "lake", "another")
    with pytest.raises(TargetForeignError, match="'shop'"):
        other.load_target(NAME)
    with pytest.raises(TargetForeignError):
        other.begin_snapshot(ITEMS, Position.of(200))
    assert items.rows() == items.source.sorted_rows()


def test_k10_a_table_that_is_not_ours_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    sink = DeltaSink(spark, tmp_path, PIPELINE)
    spark.range(3).write.format("delta").save(str(sink.path(NAME)))
    with pytest.raises(TargetForeignError, match="not Penstock"):
        sink.load_target(NAME)
    with pytest.raises(TargetForeignError):
        sink.begin_snapshot(ITEMS, Position.of(100))
    assert spark.read.format("delta").load(str(sink.path(NAME))).count() == 3


def test_k09_a_table_dropped_during_an_epoch_is_not_recreated_from_it(items: Mirror) -> None:
    target = items.target()
    shutil.rmtree(items.path)
    items.source.insert(item(20))
    items.source.commit()
    items.spool()
    changes = items.changes(items.reached, items.source.position)
    assert changes is not None
    with pytest.raises(TargetRewoundError):
        items.sink.apply(target, changes, Position.of(items.source.position))
    assert not items.path.exists()


def test_k09_a_table_restored_during_an_epoch_is_refused_and_then_continues_from_its_rows(
    spark: SparkSession, items: Mirror
) -> None:
    source = items.source
    target = items.target()
    source.insert(item(20))
    first = source.commit()
    items.follow()
    version = len(items.commits()) - 1
    source.delete(at(20))
    second = source.commit()
    items.follow()
    source.insert(item(21))
    source.commit()
    items.spool()
    for late in (items.path / "_delta_log").glob("*"):
        if late.name[:20].isdigit() and int(late.name[:20]) > version:
            late.unlink()
    changes = items.changes(second, source.position)
    assert changes is not None
    with pytest.raises(TargetRewoundError, match=str(Position.of(first))):
        items.sink.apply(target, changes, Position.of(source.position))
    # A restart reads the position from the table.
    assert items.target().applied == Position.of(first)


@pytest.mark.parametrize("name", ["plain", "..", ".", "_hidden", "100%", "a~b", "a/b", "ü", "x y", "it's"])
def test_table_names_become_directories_that_stay_apart(name: str) -> None:
    found = directory_name(name)
    assert found not in {"..", "."}
    assert "/" not in found
    assert "%" not in found
    assert found == name or directory_name(found) != found


def test_tables_with_any_name_can_be_opened(spark: SparkSession, tmp_path: Path) -> None:
    for name in ("..", "_hidden", "100%25", "a~b`c"):
        table = replace(ITEMS, name=TableName(".", name))
        mirror = Mirror(spark, tmp_path / directory_name(name), Source(table, [item(1)]))
        assert mirror.rows() == mirror.source.sorted_rows()


@pytest.mark.parametrize(
    "left",
    [[], [".00000000000000000000.json.1f2e.tmp", "._last_checkpoint.crc"]],
    ids=["a directory", "half a commit"],
)
def test_a_table_whose_making_was_cut_off_is_made(
    spark: SparkSession, tmp_path: Path, left: list[str]
) -> None:
    """Delta considers the remaining files a table."""
    path = DeltaSink(spark, tmp_path / "lake", PIPELINE).path(NAME)
    (path / "_delta_log" / "_staged_commits").mkdir(parents=True)
    for name in left:
        (path / "_delta_log" / name).write_bytes(b"{")
    mirror = Mirror(spark, tmp_path, Source(ITEMS, [item(key) for key in range(1, 10)]))
    assert len(mirror.rows()) == 9


@pytest.mark.parametrize("name", ["_delta_log/of-another.program", "rows.csv"])
def test_foreign_object_in_the_place_of_a_table_stays(spark: SparkSession, tmp_path: Path, name: str) -> None:
    sink = DeltaSink(spark, tmp_path / "lake", PIPELINE)
    file = sink.path(NAME) / name
    (sink.path(NAME) / "_delta_log").mkdir(parents=True)
    file.write_bytes(b"theirs")
    with pytest.raises(SinkRefusedError, match="already exists"):
        sink.begin_snapshot(ITEMS, Position.of(100))
    assert file.read_bytes() == b"theirs"
