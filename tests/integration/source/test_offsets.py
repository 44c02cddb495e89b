"""Offsets are positions: after any end of a run, the next run resumes from Spark's checkpoint."""

from __future__ import annotations

import threading

import pytest

from penstock.position import Position
from penstock.spool.retention import released_positions
from tests.support.source.stream import BatchRefusedError, ChangeSource, RunningQuery
from tests.support.waiting import wait_for

pytestmark = pytest.mark.source


def refuse(number: int) -> None:
    raise BatchRefusedError(f"batch {number}")


def ids(run: RunningQuery) -> list[int]:
    return [row["id"] for row in run.rows]


def last_position(run: RunningQuery) -> Position:
    return Position.of(run.rows[-1]["_commit_version"])


def test_offset_is_the_position_of_the_last_commit_in_the_batch(source: ChangeSource) -> None:
    run = source.start(quietSeconds="1000000000")
    source.insert(1, 3)
    run.wait_for_rows(3)
    batch = run.filled[0]
    assert run.offset(batch.number)["position"] == str(last_position(run))


def test_restart_resumes_after_the_last_batch(source: ChangeSource) -> None:
    run = source.start()
    source.insert(1, 3)
    run.wait_for_rows(3)
    run.finish()
    source.insert(4, 5)
    again = source.start()
    source.insert(6, 6)
    again.wait_for_rows(3)
    assert ids(again) == [4, 5, 6]


def test_batch_that_failed_is_repeated_with_the_same_range(source: ChangeSource) -> None:
    source.insert(1, 3)
    failed = source.start(refuse)
    assert "BatchRefusedError" in failed.wait_for_failure()
    numbers = sorted(
        int(path.name) for path in (failed.checkpoint / "offsets").iterdir() if path.name.isdecimal()
    )
    planned = failed.offset(numbers[-1])
    source.insert(4, 6)
    again = source.start()
    again.wait_for_rows(6)
    first = again.filled[0]
    assert [row["id"] for row in first.rows] == [1, 2, 3]
    assert (first.number, again.offset(first.number)) == (numbers[-1], planned)


def test_deleting_the_spool_between_runs_loses_nothing_and_doubles_nothing(source: ChangeSource) -> None:
    run = source.start()
    source.insert(1, 3)
    run.wait_for_rows(3)
    run.finish()
    source.wait_for_idle_slot()
    source.delete_spool()
    source.insert(4, 6)
    failed = source.start(refuse)
    failed.wait_for_failure()
    source.wait_for_idle_slot()
    source.delete_spool()
    source.insert(7, 9)
    again = source.start()
    again.wait_for_rows(6)
    assert ids(again) == [4, 5, 6, 7, 8, 9]


def test_slot_is_not_confirmed_before_spark_has_committed_the_batch(source: ChangeSource) -> None:
    held, entered = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        entered.set()
        assert held.wait(60)
        refuse(number)

    source.insert(1, 3)
    run = source.start(hold)
    wait_for(entered.is_set, "batch")
    # The capture runs beside the batch and confirms released positions.
    source.insert_segments(3, 1, first=4)
    during = source.confirmed
    held.set()
    run.wait_for_failure()
    after = source.confirmed
    again = source.start()
    again.wait_for_rows(6)
    first = Position.of(again.rows[0]["_commit_version"])
    assert during < first
    assert after < first
    again.wait_for(lambda: source.confirmed >= last_position(again), "confirmation of the last batch")


def test_new_checkpoint_resumes_at_the_position_of_the_consumer(source: ChangeSource) -> None:
    run = source.start()
    source.insert(1, 3)
    run.wait_for_rows(3)
    run.wait_for(lambda: source.confirmed >= last_position(run), "confirmation")
    run.finish()
    source.insert(4, 6)
    source.checkpoint = source.checkpoint.with_name("another")
    again = source.start()
    again.wait_for_rows(3)
    assert ids(again) == [4, 5, 6]


def test_two_queries_share_one_slot_and_one_spool(source: ChangeSource) -> None:
    """One of them captures; the other finds the spool locked and reads its segments."""
    one = source.start(consumer="one")
    source.wait_for_active_slot()
    source.checkpoint = source.checkpoint.with_name("another")
    two = source.start(consumer="two")
    wait_for(lambda: len(released_positions(source.spool)) == 2, "second consumer")
    source.insert(1, 3)
    one.wait_for_rows(3)
    two.wait_for_rows(3)
    assert ids(one) == ids(two)
