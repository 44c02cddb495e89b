"""What the writer knows of its spool without looking, and when it pauses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.spool import SpoolBudget, SpoolReader, SpoolStock, SpoolWriter, release, storage
from penstock.spool.stock import DELETE_AT_ONCE
from tests.unit.spool.builders import ITEMS, ORDERS, Commit, at, capture, piece, transactions

THREE = [[Commit(10)], [Commit(20, (ORDERS, ITEMS))], [Commit(30)]]


def stock_of(root: Path, clock: Callable[[], float] = lambda: 0.0) -> SpoolStock:
    stock = SpoolStock(SpoolReader(root), look_seconds=30, clock=clock)
    stock.look()
    return stock


def test_it_counts_what_the_spool_held_before_it_began(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    stock = stock_of(tmp_path)
    assert [stock.waiting(released) for released in (None, at(0), at(10), at(29), at(30), at(99))] == [3, 3, 2, 1, 0, 0]
    sizes = [segment.bytes for segment in SpoolReader(tmp_path).segments()]
    assert [stock.waiting_bytes(released) for released in (None, at(10), at(30))] == [sum(sizes), sum(sizes[1:]), 0]


def test_adding_up_comes_to_what_looking_finds(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    stock = stock_of(tmp_path)
    writer = SpoolWriter(tmp_path, at(20))
    for position in (30, 40, 50):
        writer.append(transactions(Commit(position)))
        manifest = writer.seal()
        assert manifest is not None
        stock.add(manifest)
    for released in (at(5), at(10), at(40), at(60)):
        release(tmp_path, "one", released)
        stock.delete_released(released)
        looked = stock_of(tmp_path)
        for upto in (None, at(0), at(20), at(45), at(50)):
            assert (stock.waiting(upto), stock.waiting_bytes(upto)) == (looked.waiting(upto), looked.waiting_bytes(upto))
    assert [segment.end for segment in SpoolReader(tmp_path).segments()] == [at(50)]


def test_nothing_is_listed_to_find_out_what_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    capture(tmp_path, 0, THREE)
    release(tmp_path, "one", at(5))
    stock = stock_of(tmp_path, lambda: now[0])
    budget = SpoolBudget(stock, 1, interval_seconds=0)
    listed: list[Path] = []
    list_directories = storage.list_directories

    def list_and_note(path: Path) -> list[storage.Entry]:
        listed.append(path)
        return list_directories(path)

    monkeypatch.setattr(storage, "list_directories", list_and_note)
    for _ in range(100):
        stock.delete_released(at(5))
        assert budget.must_pause()
    assert listed == []
    release(tmp_path, "one", at(10))
    stock.delete_released(at(10))
    assert listed == [], "nor when there is: what the writer has sealed it knows by heart"
    assert [segment.end for segment in SpoolReader(tmp_path).segments()] == [at(20), at(30)]
    listed.clear()
    now[0] = 30.0
    stock.delete_released(at(10))
    assert len(listed) == 1


def test_a_long_backlog_is_deleted_in_steps_the_oldest_first(tmp_path: Path) -> None:
    capture(tmp_path, 0, [[Commit(position)] for position in range(1, DELETE_AT_ONCE + 11)])
    release(tmp_path, "one", at(1000))
    stock = stock_of(tmp_path)
    reader = SpoolReader(tmp_path)
    stock.delete_released(at(1000))
    assert [segment.end for segment in reader.segments()] == [at(position) for position in range(DELETE_AT_ONCE + 1, DELETE_AT_ONCE + 11)]
    stock.delete_released(at(1000))
    assert [segment.end for segment in reader.segments()] == [at(DELETE_AT_ONCE + 10)]


def test_a_spool_deleted_by_hand_is_noticed(tmp_path: Path) -> None:
    now = [0.0]
    capture(tmp_path, 0, THREE)
    stock = stock_of(tmp_path, lambda: now[0])
    shutil.rmtree(tmp_path / "segments")
    now[0] = 30.0
    stock.delete_released(None)
    assert stock.waiting(None) == 0


def test_the_capture_pauses_at_the_limit_and_goes_on_well_below_it(tmp_path: Path) -> None:
    now = [0.0]
    capture(tmp_path, 0, THREE)
    release(tmp_path, "one", at(0))
    stock = stock_of(tmp_path)
    sizes = [segment.bytes for segment in SpoolReader(tmp_path).segments()]
    budget = SpoolBudget(stock, sum(sizes) - 1, interval_seconds=1, clock=lambda: now[0])
    assert budget.must_pause()
    release(tmp_path, "one", at(10))
    assert budget.must_pause(), "not looked again yet"
    now[0] = 1.0
    assert not budget.must_pause()
    assert not SpoolBudget(stock, sum(sizes[1:])).must_pause()


def test_a_paused_capture_does_not_flutter_around_the_limit(tmp_path: Path) -> None:
    now = [0.0]
    capture(tmp_path, 0, [[Commit(position, (ORDERS,))] for position in range(1, 41)])
    release(tmp_path, "one", at(0))
    stock = stock_of(tmp_path)
    size = SpoolReader(tmp_path).segments()[0].bytes
    budget = SpoolBudget(stock, 39 * size, interval_seconds=1, clock=lambda: now[0])
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
    budget = SpoolBudget(stock_of(tmp_path), 1, interval_seconds=0)
    assert budget.must_pause()
    release(tmp_path, "one", at(10))
    assert not budget.must_pause()
