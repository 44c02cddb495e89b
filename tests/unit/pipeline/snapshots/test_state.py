"""Durable state of an unfinished snapshot."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.pipeline.snapshots.copy import chunk_bytes
from penstock.pipeline.snapshots.state import (
    ChunkRecord,
    SnapshotPlan,
    SnapshotStore,
    load_all_progress,
    load_progress,
    new_plan_id,
    record_chunk,
)
from penstock.position import Position
from penstock.postgres.chunks import cut_chunks
from penstock.postgres.snapshot_export import CopyFingerprint, Leaf, MeasuredTable
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.base import SnapshotFile, SnapshotPlace

NAME = TableName("a.b", 'odd "name"')
SCHEMA = TableSchema(
    7, NAME, (Column("id", pa.int64(), 20), Column("v", pa.decimal128(38, 18), 1700)), ("id",)
)
LEAVES = (Leaf(7, NAME, 70), Leaf(8, TableName("x", "leaf"), 80))
OUTLINE = CopyFingerprint(SCHEMA, (1, 3), ("bigint",), "(id > 0)", "16384/17", True, LEAVES, "f00")
STARTED = datetime(2026, 1, 1, tzinfo=UTC)


def make_plan(fence: int = 100) -> SnapshotPlan:
    chunks = tuple(cut_chunks(MeasuredTable(OUTLINE, {7: 4 * 8192, 8: 0}), 2 * 8192))
    place = SnapshotPlace(
        "/lake/t",
        pa.schema([("id", pa.int64()), ("col-1", pa.decimal128(38, 18))]),
        "snapshot-64",
        (("at", 5), ("gone", None)),
    )
    return SnapshotPlan(new_plan_id(), OUTLINE, Position.of(fence), place, chunks, STARTED)


def make_record(number: int, seconds: float = 0.0) -> ChunkRecord:
    file = SnapshotFile(f"snapshot-{number}.parquet", 10, 1000, '{"numRecords": 10}')
    return ChunkRecord(number, Position.of(100 + number), file, STARTED + timedelta(seconds=seconds))


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path, "shop")


def test_a_plan_and_its_records_come_back_as_they_were(store: SnapshotStore) -> None:
    plan = make_plan()
    store.begin(plan)
    record_chunk(store.records_directory(plan), make_record(1))
    saved = store.load(NAME)
    assert saved is not None
    assert saved.plan == plan
    assert saved.records == {1: make_record(1)}
    assert saved.missing == [0, 2]
    assert saved.fences == [Position.of(101)]
    assert saved.plan.outline.difference(OUTLINE) is None
    assert store.tables() == [NAME]


def test_a_new_plan_leaves_nothing_of_the_one_before(store: SnapshotStore) -> None:
    former = make_plan()
    store.begin(former)
    record_chunk(store.records_directory(former), make_record(0))
    plan = make_plan(200)
    store.begin(plan)
    saved = store.load(NAME)
    assert saved is not None
    assert (saved.plan, saved.records) == (plan, {})
    with pytest.raises(FileNotFoundError):
        record_chunk(
            store.records_directory(former), make_record(1)
        )  # a task of the former plan, which could not be cancelled


def test_unreadable_state_counts_as_none(store: SnapshotStore) -> None:
    plan = make_plan()
    store.begin(plan)
    path = store.records_directory(plan) / "chunk-000000.json"
    path.write_text('{"format": 1')
    assert store.load(NAME) is None
    path.unlink()
    assert store.load(NAME) is not None
    (store.records_directory(plan).parent / "plan.json").write_text("{}")
    assert store.load(NAME) is None
    assert store.tables() == []


def test_forgotten_state_is_deleted(store: SnapshotStore, tmp_path: Path) -> None:
    plan = make_plan()
    store.begin(plan)
    store.forget(NAME)
    store.forget(NAME)
    assert store.load(NAME) is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_progress_tells_rates_and_the_time_left(store: SnapshotStore, tmp_path: Path) -> None:
    plan = replace(make_plan(), chunks=make_plan().chunks[:1] * 10)
    store.begin(plan)
    assert (found := load_progress(tmp_path, "shop", NAME)) is not None
    assert (found.chunks_done, found.rows_per_second, found.seconds_left) == (0, None, None)
    for number in range(4):
        # The first two belong to a run of long ago.
        record_chunk(
            store.records_directory(plan),
            make_record(number, seconds=number if number < 2 else 1000 + number),
        )
    found = load_all_progress(tmp_path, "shop")[NAME]
    assert (found.chunks_done, found.chunks_total, found.rows, found.target_bytes) == (4, 10, 40, 4000)
    assert (found.heap_bytes_done, found.heap_bytes_total) == (4 * 16384, 10 * 16384)
    assert (found.rows_per_second, found.heap_bytes_per_second, found.seconds_left) == (10.0, 16384.0, 6.0)
    assert found.as_document()["seconds_left"] == 6.0


@pytest.mark.parametrize(
    ("total_mb", "largest_mb", "lanes", "expected_mb"),
    [
        (1, 128, 2, 16),
        (300, 128, 2, 37.5),
        (10_000, 128, 2, 128),
        (10_000, 128, 64, 39.0625),
        (10_000, 8, 2, 8),
    ],
)
def test_chunks_are_large_enough_for_efficient_files_and_small_enough_for_all_executors(
    total_mb: int, largest_mb: int, lanes: int, expected_mb: float
) -> None:
    assert chunk_bytes(total_mb << 20, largest_mb << 20, lanes) == int(expected_mb * (1 << 20))


@pytest.mark.parametrize("place", ["id", "prefix", "file"])
def test_a_stored_path_in_place_of_a_name_counts_as_nothing(
    store: SnapshotStore, tmp_path: Path, place: str
) -> None:
    plan = make_plan()
    store.begin(plan)
    record_chunk(store.records_directory(plan), make_record(1))
    (path,) = tmp_path.rglob("plan.json" if place != "file" else "chunk-*.json")
    text = path.read_text(encoding="utf-8")
    name = {"id": plan.id, "prefix": "snapshot-64", "file": "snapshot-1.parquet"}[place]
    path.write_text(text.replace(f'"{name}"', f'"../{name}"'), encoding="utf-8")
    assert store.load(NAME) is None
