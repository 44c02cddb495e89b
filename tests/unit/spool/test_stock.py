"""The extent of the spool as the writer tracks it, and when the writer pauses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import storage
from penstock.spool import SegmentUsage, SpoolBudget, SpoolReader, SpoolWriter, release
from penstock.spool.retention import DELETE_AT_ONCE
from tests.support.spool.builders import ITEMS, ORDERS, Commit, at, capture, piece, transactions

THREE = [[Commit(10)], [Commit(20, (ORDERS, ITEMS))], [Commit(30)]]


def usage_of(root: Path, clock: Callable[[], float] = lambda: 0.0) -> SegmentUsage:
    usage = SegmentUsage(SpoolReader(root), scan_seconds=30, clock=clock)
    usage.scan()
    return usage


def test_it_counts_segments_from_before_its_start(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    usage = usage_of(tmp_path)
    assert [usage.waiting(released) for released in (None, at(0), at(10), at(29), at(30), at(99))] == [
        3,
        3,
        2,
        1,
        0,
        0,
    ]
    sizes = [segment.bytes for segment in SpoolReader(tmp_path).segments()]
    assert [usage.waiting_bytes(released) for released in (None, at(10), at(30))] == [
        sum(sizes),
        sum(sizes[1:]),
        0,
    ]


def test_running_totals_equal_a_full_scan(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    usage = usage_of(tmp_path)
    writer = SpoolWriter(tmp_path, at(20))
    for position in (30, 40, 50):
        writer.append(transactions(Commit(position)))
        manifest = writer.seal()
        assert manifest is not None
        usage.add(manifest)
    for released in (at(5), at(10), at(40), at(60)):
        release(tmp_path, "one", released)
        usage.delete_released(released)
        looked = usage_of(tmp_path)
        for upto in (None, at(0), at(20), at(45), at(50)):
            assert (usage.waiting(upto), usage.waiting_bytes(upto)) == (
                looked.waiting(upto),
                looked.waiting_bytes(upto),
            )
    assert [segment.end for segment in SpoolReader(tmp_path).segments()] == [at(50)]


def test_deleting_lists_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    capture(tmp_path, 0, THREE)
    release(tmp_path, "one", at(5))
    usage = usage_of(tmp_path, lambda: now[0])
    budget = SpoolBudget(usage, 1, interval_seconds=0)
    listed: list[Path] = []
    list_directories = storage.list_directories

    def list_and_note(path: Path) -> list[storage.DirectoryEntry]:
        listed.append(path)
        return list_directories(path)

    monkeypatch.setattr(storage, "list_directories", list_and_note)
    for _ in range(100):
        usage.delete_released(at(5))
        assert budget.must_pause()
    assert listed == []
    release(tmp_path, "one", at(10))
    usage.delete_released(at(10))
    assert listed == [], "not even when there is one: the writer tracks its own segments"
    assert [segment.end for segment in SpoolReader(tmp_path).segments()] == [at(20), at(30)]
    listed.clear()
    now[0] = 30.0
    usage.delete_released(at(10))
    assert len(listed) == 1


def test_a_long_backlog_is_deleted_in_steps_the_oldest_first(tmp_path: Path) -> None:
    capture(tmp_path, 0, [[Commit(position)] for position in range(1, DELETE_AT_ONCE + 11)])
    release(tmp_path, "one", at(1000))
    usage = usage_of(tmp_path)
    reader = SpoolReader(tmp_path)
    usage.delete_released(at(1000))
    assert [segment.end for segment in reader.segments()] == [
        at(position) for position in range(DELETE_AT_ONCE + 1, DELETE_AT_ONCE + 11)
    ]
    usage.delete_released(at(1000))
    assert [segment.end for segment in reader.segments()] == [at(DELETE_AT_ONCE + 10)]


def test_a_spool_deleted_by_hand_is_noticed(tmp_path: Path) -> None:
    now = [0.0]
    capture(tmp_path, 0, THREE)
    usage = usage_of(tmp_path, lambda: now[0])
    shutil.rmtree(tmp_path / "segments")
    now[0] = 30.0
    usage.delete_released(None)
    assert usage.waiting(None) == 0


def test_the_capture_pauses_at_the_limit_and_resumes_well_below_it(tmp_path: Path) -> None:
    now = [0.0]
    capture(tmp_path, 0, THREE)
    release(tmp_path, "one", at(0))
    usage = usage_of(tmp_path)
    sizes = [segment.bytes for segment in SpoolReader(tmp_path).segments()]
    budget = SpoolBudget(usage, sum(sizes) - 1, interval_seconds=1, clock=lambda: now[0])
    assert budget.must_pause()
    release(tmp_path, "one", at(10))
    assert budget.must_pause(), "not listed again yet"
    now[0] = 1.0
    assert not budget.must_pause()
    assert not SpoolBudget(usage, sum(sizes[1:])).must_pause()


def test_a_paused_capture_does_not_flutter_around_the_limit(tmp_path: Path) -> None:
    now = [0.0]
    capture(tmp_path, 0, [[Commit(position, (ORDERS,))] for position in range(1, 41)])
    release(tmp_path, "one", at(0))
    usage = usage_of(tmp_path)
    size = SpoolReader(tmp_path).segments()[0].bytes
    budget = SpoolBudget(usage, 39 * size, interval_seconds=1, clock=lambda: now[0])
    answers = []
    for position in (0, 1, 4, 6):
        release(tmp_path, "one", at(position))
        now[0] += 1
        answers.append(budget.must_pause())
    assert answers == [True, True, True, False]


def test_pausing_stops_when_only_waiting_cannot_help(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0), piece_buffer_bytes=0)
    writer.append(transactions(Commit(10)))
    writer.seal()
    writer.append(piece(7, (ORDERS, 0)))
    budget = SpoolBudget(usage_of(tmp_path), 1, interval_seconds=0)
    assert budget.must_pause()
    release(tmp_path, "one", at(10))
    assert not budget.must_pause()
