"""The control stream, which triggers the epochs of a pipeline."""

from __future__ import annotations

import shutil

import pytest

from penstock.position import Position
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release
from tests.support.source.stream import ChangeSource, RunningQuery
from tests.support.waiting import wait_for

pytestmark = pytest.mark.source


def last_offset(run: RunningQuery) -> tuple[Position, str]:
    offset = run.offset(run.batches[-1].number)
    return Position.parse(offset["position"]), offset["run"]


def wait_beyond(run: RunningQuery, position: Position) -> Position:
    run.wait_for(lambda: run.batches and last_offset(run)[0] > position, f"batch beyond {position}")
    return last_offset(run)[0]


def test_batches_have_no_rows_and_run_no_task(source: ChangeSource) -> None:
    run = source.start_control(run="a")
    source.wait_for_active_slot()
    source.insert(1, 3)
    source.wait_for_spool(3)
    end = SpoolReader(source.spool).end
    assert end is not None
    run.wait_for(lambda: run.batches and last_offset(run) >= (end, "a"), f"batch up to {end}")
    assert run.query is not None
    assert list(source.spark.sparkContext.statusTracker().getJobIdsForGroup(str(run.query.runId))) == []


def test_every_run_begins_with_a_batch_even_if_nothing_is_new(source: ChangeSource) -> None:
    run = source.start_control(run="a")
    source.insert(1, 3)
    before = wait_beyond(run, Position.ZERO)
    run.finish()
    again = source.start_control(run="b", quietSeconds="1000000000")
    again.wait_for(lambda: again.batches and last_offset(again)[1] == "b", "batch of the new run")
    assert last_offset(again)[0] >= before


def test_offsets_do_not_go_back_when_the_spool_is_gone(source: ChangeSource) -> None:
    run = source.start_control(run="a")
    source.insert(1, 3)
    before = wait_beyond(run, Position.ZERO)
    run.finish()
    source.wait_for_idle_slot()
    source.delete_spool()
    again = source.start_control(run="b")
    source.insert(4, 6)
    wait_beyond(again, before)
    ends = [Position.parse(again.offset(batch.number)["position"]) for batch in again.batches]
    assert ends == sorted(ends)
    assert ends[0] >= before


def test_checkpoint_older_than_the_spool_is_no_reason_to_stop(source: ChangeSource) -> None:
    run = source.start_control(run="a")
    source.insert(1, 3)
    before = wait_beyond(run, Position.ZERO)
    run.finish()
    old = shutil.copytree(source.checkpoint, source.checkpoint.with_name("old"))
    again = source.start_control(run="b")
    source.insert_segments(2, 1, first=4)
    reader = SpoolReader(source.spool)
    end = reader.end
    assert end is not None
    release(source.spool, "pipeline", end)
    wait_for(lambda: (reader.start or Position.ZERO) > before, "released segments to go")
    again.stop()
    source.wait_for_idle_slot()
    late = source.start_control(old, run="c")
    assert wait_beyond(late, before) > before
