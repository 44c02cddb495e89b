from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from penstock.position import Position
from penstock.spool import SpoolReader
from penstock.spool.barriers import LEASE_SECONDS, Barrier, BarrierRequest, BarrierWatch
from tests.support.spool.builders import Commit, at, capture, changes

_LOG = [[Commit(10), Commit(20)], [Commit(30), Commit(40), Commit(50)], [Commit(60)]]


def _cut(spool: SpoolReader, barrier: Barrier, start: int, planned: int) -> int:
    return barrier.cut(spool, at(start), at(planned)).value


def test_a_placed_barrier_ends_the_batch_that_would_step_over_it_and_no_other(tmp_path: Path) -> None:
    capture(tmp_path, 0, _LOG)
    spool = SpoolReader(tmp_path)
    barrier = Barrier("b", at(5), at(45))
    assert _cut(spool, barrier, 0, 60) == 45
    assert _cut(spool, barrier, 20, 60) == 45
    assert _cut(spool, barrier, 0, 20) == 20, "earlier changes are unaffected"
    assert _cut(spool, barrier, 45, 60) == 60, "past it"
    assert _cut(spool, barrier, 50, 60) == 60, "missed"


def test_a_batch_cut_at_a_barrier_and_the_one_after_it_hold_every_transaction_once(tmp_path: Path) -> None:
    """The position is that of the server between two commits, 45 here: no commit record spans it."""
    capture(tmp_path, 0, _LOG)
    spool = SpoolReader(tmp_path)
    upto, beyond = changes(spool.read(at(0), at(45))), changes(spool.read(at(45), at(60)))
    assert [position for _, position, _ in upto["orders"]] == [10, 20, 30, 40]
    assert [position for _, position, _ in beyond["orders"]] == [50, 60]


def test_an_announced_barrier_lets_batches_end_with_segments_that_lie_before_it(tmp_path: Path) -> None:
    capture(tmp_path, 0, _LOG)
    spool = SpoolReader(tmp_path)
    assert _cut(spool, Barrier("b", at(35)), 0, 60) == 20, (
        "not at 35 itself, which may be inside a commit record"
    )
    assert _cut(spool, Barrier("b", at(35)), 20, 60) == 20, "waits"
    assert _cut(spool, Barrier("b", at(60)), 20, 60) == 60


def test_the_first_of_several_barriers_counts(tmp_path: Path) -> None:
    capture(tmp_path / "spool", 0, _LOG)
    spool = SpoolReader(tmp_path / "spool")
    watch = BarrierWatch(tmp_path / "barriers")
    with (
        BarrierRequest(tmp_path / "barriers", at(0)) as one,
        BarrierRequest(tmp_path / "barriers", at(0)) as other,
    ):
        one.place(at(45))
        other.place(at(25))
        assert watch.cut(spool, at(0), at(60)) == at(25)
        assert watch.cut(spool, at(25), at(60)) == at(45)
        assert watch.cut(spool, at(45), at(60)) == at(60)
    assert list((tmp_path / "barriers").iterdir()) == []


def test_a_request_only_moves_forward_and_is_seen_by_readers(tmp_path: Path) -> None:
    watch = BarrierWatch(tmp_path)
    with BarrierRequest(tmp_path, at(10)) as request:
        assert [(each.after, each.position) for each in watch.load()] == [(at(10), None)]
        request.advance(at(30))
        request.advance(at(20))
        assert [(each.after, each.position) for each in watch.load()] == [(at(30), None)]
        request.place(at(40))
        assert [(each.after, each.position) for each in watch.load()] == [(at(30), at(40))]
        (file,) = tmp_path.iterdir()
        assert set(json.loads(file.read_text())) == {"after", "position", "beat"}, "positions only"
    assert watch.load() == []


def test_a_barrier_whose_owner_is_dead_holds_nothing_up_for_longer_than_its_lease(tmp_path: Path) -> None:
    (tmp_path / "1-dead.json").write_text('{"after": "0/A", "position": null, "beat": 3}')
    now = 0.0
    watch = BarrierWatch(tmp_path, clock=lambda: now)
    assert len(watch.load()) == 1
    now = LEASE_SECONDS
    assert len(watch.load()) == 1
    now = LEASE_SECONDS + 0.1
    assert watch.load() == []
    assert list(tmp_path.iterdir()) == []


def test_a_barrier_that_beats_stays_however_long_it_takes(tmp_path: Path) -> None:
    now = 0.0
    watch = BarrierWatch(tmp_path, clock=lambda: now)
    for beat in range(5):
        (tmp_path / "1-alive.json").write_text(json.dumps({"after": "0/A", "position": None, "beat": beat}))
        assert len(watch.load()) == 1
        now += LEASE_SECONDS - 1


def test_a_request_has_a_heartbeat(tmp_path: Path) -> None:
    watch = BarrierWatch(tmp_path)
    with BarrierRequest(tmp_path, at(10), beat_seconds=0.01):
        deadline = time.monotonic() + 60
        while watch.load()[0].beat < 3:
            assert time.monotonic() < deadline, "it does not beat"
    assert "penstock-barrier" not in {thread.name for thread in threading.enumerate()}


def test_an_invalid_barrier_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("not even JSON")
    (tmp_path / "half.json").write_text("{}")
    (tmp_path / "x.json.1.tmp").write_text('{"after": "0/A"}')
    assert BarrierWatch(tmp_path).load() == []
    assert BarrierWatch(tmp_path / "none").cut(SpoolReader(tmp_path), Position.ZERO, at(5)) == at(5)
