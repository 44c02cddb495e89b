"""A stream that starts with a snapshot at a fence, followed by every later change."""

from __future__ import annotations

import threading

import pytest
from pyspark.sql import Row

from penstock.position import Position
from penstock.spark.options import SNAPSHOT
from penstock.spark.snapshot_plan import load_plan
from penstock.spool.retention import released_positions
from tests.support.source.engine import fold
from tests.support.source.snapshots import BLOCK, current, fill
from tests.support.source.stream import BatchRefusedError, ChangeSource, OnBatch, RunningQuery
from tests.support.waiting import wait_for

CONSUMER = "spark-public.orders"


def start(source: ChangeSource, on_batch: OnBatch | None = None, **options: str) -> RunningQuery:
    """Snapshot first, one block of the table a batch."""
    return source.start(on_batch, None, **{**BLOCK, **options})


def wait_until_equal(source: ChangeSource, *runs: RunningQuery) -> list[Row]:
    def rows() -> list[Row]:
        return [row for run in runs for row in run.rows]

    runs[-1].wait_for(lambda: fold(rows()) == current(source), "rows equal to the table")
    return rows()


def snapshot_ids(rows: list[Row]) -> list[int]:
    return [row["id"] for row in rows if row["_change_type"] == "snapshot"]


@pytest.mark.source
@pytest.mark.newest
def test_N01_rows_that_were_there_come_first_and_changes_from_the_fence_on(source: ChangeSource) -> None:
    fill(source, 1000)
    held, entered = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        if number == 1:
            entered.set()
            assert held.wait(60)

    run = start(source, hold)
    wait_for(entered.is_set, "second batch of the snapshot")
    # While the rest of the table is still to be read.
    source.database.execute("UPDATE orders SET note = 'late' WHERE id IN (1, 999)")
    source.database.execute("DELETE FROM orders WHERE id IN (2, 1000)")
    source.database.execute("UPDATE orders SET id = 5000 WHERE id = 3")
    source.insert(2000, 2002)
    held.set()
    rows = wait_until_equal(source, run)
    found = [row for row in rows if row["_change_type"] == "snapshot"]
    assert sorted(row["id"] for row in found) == list(range(1, 1001))
    (fence,) = {row["_commit_version"] for row in found}
    assert all(row["_commit_version"] > fence for row in rows if row["_change_type"] != "snapshot")
    places = [(row["_commit_version"], row["_ordinal"]) for row in rows]
    assert len(set(places)) == len(places)
    assert {(row["_commit_timestamp"], row["_xid"], row["_unchanged"], row["_exact"]) for row in found} == {
        (None, 0, None, None)
    }
    assert len([batch for batch in run.filled if batch.rows[0]["_change_type"] == "snapshot"]) >= 5


def test_N10_snapshot_is_the_default_and_needs_neither_slot_nor_publication_before(
    source: ChangeSource,
) -> None:
    source.drop_slot()
    source.database.execute(f"DROP PUBLICATION {source.slot}")
    source.insert(1, 3)
    run = source.start(startingPosition="")
    assert sorted(row["id"] for row in run.wait_for_rows(3)) == [1, 2, 3]
    source.insert(4, 4)
    assert [(row["id"], row["_change_type"]) for row in run.wait_for_rows(4)[3:]] == [(4, "insert")]


def test_N05_empty_table_gives_no_row_and_then_its_changes(source: ChangeSource) -> None:
    run = source.start(startingPosition=SNAPSHOT)
    run.wait_for(lambda: run.batches, "first batch")
    source.insert(1, 2)
    assert [row["_change_type"] for row in run.wait_for_rows(2)] == ["insert", "insert"]


def fill_to_the_brim(source: ChangeSource) -> None:
    """About 1,000 rows, number 900 with a long value out of line; no block has room for another row."""
    execute, size = source.database.execute, "SELECT pg_relation_size('orders')"
    execute("ALTER TABLE orders ALTER note SET STORAGE EXTERNAL")
    fill(source, 899)
    execute("INSERT INTO orders VALUES (900, repeat('long', 2000))")
    source.insert(901, 1000)
    before, number = source.database.query(size), 1000
    while source.database.query(size) == before:
        number += 1
        source.insert(number, number)
    execute("DELETE FROM orders WHERE id = %s", number)
    execute("VACUUM orders")
    assert source.database.query(size) == before


@pytest.mark.source
@pytest.mark.newest
def test_N03_after_a_crash_finished_blocks_are_not_read_again_and_the_end_is_right(
    source: ChangeSource,
) -> None:
    fill_to_the_brim(source)

    def fail_on_the_third(number: int) -> None:
        if number == 2:
            raise BatchRefusedError(f"batch {number}")

    first = start(source, fail_on_the_third)
    assert "BatchRefusedError" in first.wait_for_failure()
    source.wait_for_idle_slot()
    # While the snapshot is held, VACUUM removes nothing.
    held = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'penstock snapshot%'"
    )
    wait_for(
        lambda: source.database.query(held) == [(0,)],
        "end of the snapshot",
        lambda: source.database.query(held),
    )
    done = snapshot_ids(first.rows)
    assert 0 < len(done) < 600
    # A row moves from an unread block into free space in blocks that were read. Its long value is unchanged,
    # so the change does not contain it.
    source.database.execute("DELETE FROM orders WHERE id = ANY (%s)", done[: len(done) // 2])
    source.database.execute("VACUUM orders")
    source.database.execute("UPDATE orders SET id = id WHERE id = 900")
    ((block,),) = source.database.query("SELECT (ctid::text::point)[0]::int FROM orders WHERE id = 900")
    assert block < 2, "the row did not move, so the test shows nothing"
    source.insert(3000, 3001)
    again = start(source)
    rows = wait_until_equal(source, first, again)
    assert set(snapshot_ids(again.rows)) & set(done) == set()
    plan = load_plan(source.spool, CONSUMER)
    assert plan is not None
    assert plan.replans == 1
    assert {row["_commit_version"] for row in rows if row["_change_type"] == "snapshot"} == {plan.fence.value}


@pytest.mark.source
def test_batch_of_the_snapshot_that_failed_is_repeated_with_the_same_range(source: ChangeSource) -> None:
    fill(source, 600)

    def refuse(number: int) -> None:
        raise BatchRefusedError(f"batch {number}")

    failed = start(source, refuse)
    assert "BatchRefusedError" in failed.wait_for_failure()
    planned = failed.offset(0)
    again = start(source)
    wait_until_equal(source, again)
    assert again.filled[0].number == 0
    assert again.offset(0) == planned
    assert sorted(snapshot_ids(again.rows)) == list(range(1, 601))


def test_table_rewritten_in_the_middle_is_read_again_and_ends_right(source: ChangeSource) -> None:
    fill(source, 1000)

    def rewrite(number: int) -> None:
        if number == 1:
            source.database.execute("DELETE FROM orders WHERE id <= 500")
            source.database.execute("VACUUM FULL orders")

    run = start(source, rewrite)
    rows = wait_until_equal(source, run)
    plan = load_plan(source.spool, CONSUMER)
    assert plan is not None
    assert plan.replans >= 1
    assert set(range(501, 1001)) <= set(snapshot_ids(rows))


def test_snapshot_is_held_no_longer_than_allowed(source: ChangeSource) -> None:
    fill(source, 600)
    run = start(source, snapshotHoldSeconds="0")
    wait_until_equal(source, run)
    plan = load_plan(source.spool, CONSUMER)
    assert plan is not None
    assert plan.replans >= 1
    held = "SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()"
    run.wait_for(lambda: source.database.query(held) == [(0,)], "end of the snapshot on the source")


def test_table_without_a_key_whose_snapshot_was_lost_stops(source: ChangeSource) -> None:
    source.database.execute("CREATE TABLE keyless (id int, note text)")
    source.database.execute("ALTER TABLE keyless REPLICA IDENTITY FULL")
    source.database.execute("INSERT INTO keyless SELECT g, 'n' FROM generate_series(1, 1000) g")

    def fail_on_the_second(number: int) -> None:
        if number == 1:
            raise BatchRefusedError(f"batch {number}")

    assert "BatchRefusedError" in start(source, fail_on_the_second, table="public.keyless").wait_for_failure()
    source.wait_for_idle_slot()
    assert "PEN-1402" in start(source, table="public.keyless").wait_for_failure()


def test_plan_that_is_gone_is_an_error_and_not_a_shorter_snapshot(source: ChangeSource) -> None:
    fill(source, 600)

    def fail_on_the_second(number: int) -> None:
        if number == 1:
            raise BatchRefusedError(f"batch {number}")

    assert "BatchRefusedError" in start(source, fail_on_the_second).wait_for_failure()
    source.wait_for_idle_slot()
    source.delete_spool()
    assert "PEN-2003" in start(source).wait_for_failure()


def test_source_keeps_commits_after_the_fence_until_spark_has_them(source: ChangeSource) -> None:
    fill(source, 600)
    held, entered = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        if number == 1:
            entered.set()
            assert held.wait(60)

    run = start(source, hold)
    wait_for(entered.is_set, "second batch")
    source.insert_segments(2, 1, first=2000)
    plan = load_plan(source.spool, CONSUMER)
    assert plan is not None
    assert released_positions(source.spool)[CONSUMER] == plan.fence
    assert source.confirmed <= plan.fence
    held.set()
    wait_until_equal(source, run)
    run.wait_for(lambda: released_positions(source.spool)[CONSUMER] > plan.fence, "release beyond the fence")


def test_N04_snapshot_that_is_over_is_not_taken_again(source: ChangeSource) -> None:
    source.insert(1, 3)
    run = source.start(startingPosition=SNAPSHOT)
    run.wait_for_rows(3)
    run.finish()
    source.insert(4, 4)
    again = source.start(startingPosition=SNAPSHOT)
    assert [(row["id"], row["_change_type"]) for row in again.wait_for_rows(1)] == [(4, "insert")]


@pytest.mark.source
def test_new_checkpoint_takes_a_new_snapshot(source: ChangeSource) -> None:
    source.insert(1, 3)
    run = source.start(startingPosition=SNAPSHOT)
    run.wait_for_rows(3)
    run.finish()
    source.database.execute("DELETE FROM orders WHERE id = 1")
    source.checkpoint = source.checkpoint.with_name("another")
    again = source.start(startingPosition=SNAPSHOT)
    assert sorted(snapshot_ids(again.wait_for_rows(2))) == [2, 3]


@pytest.mark.source
def test_N10_now_starts_with_later_commits(source: ChangeSource) -> None:
    source.insert(1, 3)
    run = source.start(startingPosition="now")
    run.wait_for(lambda: run.batches, "first batch")
    source.insert(4, 5)
    assert [row["id"] for row in run.wait_for_rows(2)] == [4, 5]
    run.finish()
    source.insert(6, 6)
    assert [row["id"] for row in source.start(startingPosition="now").wait_for_rows(1)] == [6]


def test_N10_position_begins_with_the_commit_after_it(source: ChangeSource) -> None:
    source.insert(1, 1)
    run = source.start()
    source.insert(2, 2)
    rows = run.wait_for_rows(2)
    run.stop()
    source.wait_for_idle_slot()
    position = str(Position.of(rows[0]["_commit_version"]))
    source.checkpoint = source.checkpoint.with_name("another")
    again = source.start(startingPosition=position, consumer="another")
    assert [row["id"] for row in again.wait_for_rows(1)] == [2]


@pytest.mark.parametrize(
    ("position", "code", "words"),
    [
        ("0/10", "PEN-1205", "can no longer be read"),
        ("FF/0", "PEN-1001", "the end of the server's WAL is"),
        ("yesterday", "PEN-1001", "startingPosition"),
    ],
)
def test_unavailable_position_is_refused(source: ChangeSource, position: str, code: str, words: str) -> None:
    try:
        error = source.start(startingPosition=position).wait_for_failure()
    except Exception as raised:  # noqa: BLE001 - a text that is no position is refused at once
        error = str(raised)
    assert code in error
    assert words in error


def test_position_without_a_slot_makes_none(source: ChangeSource) -> None:
    position = str(source.confirmed)
    source.drop_slot()
    assert "PEN-1201" in source.start(startingPosition=position).wait_for_failure()
    assert source.database.query("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", source.slot) == []
