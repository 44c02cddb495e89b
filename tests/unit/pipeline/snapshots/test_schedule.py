"""Which step of which table is next."""

from __future__ import annotations

import threading

from penstock.pipeline.snapshots.schedule import Schedule, Step, WorkItem

_MB = 1 << 20


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _open(schedule: Schedule[str], **chunks: int) -> None:
    turns = [schedule.take() for _ in chunks]
    for turn in turns:
        assert turn is not None
        assert turn.step is Step.OPEN
        schedule.opened(turn, [(number, _MB) for number in range(chunks[turn.queue.table])], then=Step.COMMIT)


def _steps(schedule: Schedule[str]) -> list[tuple[str, str]]:
    """Run all steps, one after the other."""
    done = []
    while (turn := schedule.take()) is not None:
        done.append((turn.queue.table, turn.step.value))
        if turn.step is Step.CHUNK:
            schedule.read(turn, _MB, then=Step.COMMIT)
        elif turn.step is Step.REREAD:
            schedule.advance(turn, Step.COMMIT)
        else:
            schedule.advance(turn, Step.DONE)
    return done


def test_small_tables_and_a_huge_one_take_turns() -> None:
    schedule = Schedule([("huge", 0), ("a", 0), ("b", 0)])
    _open(schedule, huge=6, a=1, b=2)
    done = _steps(schedule)
    assert [name for name, step in done if step == "commit"] == ["a", "b", "huge"]
    assert "huge" in [name for name, _ in done[:2]], "the huge one is not left for the end"
    assert done.count(("huge", "chunk")) == 6


def test_a_table_is_committed_once_all_of_its_chunks_are_in() -> None:
    schedule = Schedule([("t", 0)])
    _open(schedule, t=2)
    first, second = schedule.take(), schedule.take()
    assert first is not None
    assert second is not None
    schedule.read(first, _MB, then=Step.COMMIT)
    waiting: list[WorkItem[str] | None] = []
    thread = threading.Thread(target=lambda: waiting.append(schedule.take()))
    thread.start()
    thread.join(0.3)
    assert waiting == [], "one chunk is still being read"
    schedule.read(second, _MB, then=Step.COMMIT)
    thread.join(60)
    assert [turn.step for turn in waiting if turn is not None] == [Step.COMMIT]


def test_without_the_snapshot_only_commits_are_done() -> None:
    schedule = Schedule([("read", 0), ("unread", 0), ("changed", 0)])
    turns = []
    for _ in range(3):
        turn = schedule.take()
        assert turn is not None
        turns.append(turn)
    for turn in turns:
        then = Step.COMMIT if turn.queue.table == "read" else Step.REREAD
        schedule.opened(turn, [(0, _MB), (1, _MB)] if turn.queue.table == "unread" else [], then=then)
    schedule.close()
    assert schedule.await_release(0)
    assert _steps(schedule) == [("read", "commit")]
    assert schedule.unfinished == ["unread", "changed"]


def test_an_abandoned_copy_does_no_more_work() -> None:
    schedule = Schedule([("read", 0), ("unread", 0)])
    for _ in range(2):
        turn = schedule.take()
        assert turn is not None
        schedule.opened(turn, [(0, _MB)] if turn.queue.table == "unread" else [], then=Step.COMMIT)
    schedule.give_up()
    assert schedule.take() is None
    assert schedule.unfinished == ["read", "unread"]


def test_a_snapshot_is_held_for_its_limit_at_most_and_each_round_makes_progress() -> None:
    clock = _Clock()
    schedule = Schedule([("t", 0)], hold_seconds=10, clock=clock)
    _open(schedule, t=5)
    clock.now = 100.0
    assert _steps(schedule) == [("t", "chunk")], "at least one chunk"
    assert schedule.is_expired
    assert schedule.unfinished == ["t"]


def test_a_step_that_is_put_back_waits_and_is_tried_alone() -> None:
    clock = _Clock()
    schedule = Schedule([("locked", 0), ("free", 0)], clock=clock)
    _open(schedule, locked=3, free=1)
    turn = schedule.take()
    assert turn is not None
    while turn.queue.table != "locked":
        schedule.read(turn, _MB, then=Step.DONE)
        turn = schedule.take()
        assert turn is not None
    schedule.put_back(turn, _MB, pause_seconds=5.0)
    clock.now = 6.0
    again = schedule.take()
    assert again is not None
    assert again.queue.table == "locked"
    other = schedule._next()
    assert other is None or other.queue.table == "free", "no other table waits for the same lock"
    schedule.read(again, _MB, then=Step.COMMIT)
    assert ("locked", "commit") in _steps(schedule)


def test_the_snapshot_is_released_when_only_commits_are_left() -> None:
    schedule = Schedule([("t", 0)])
    _open(schedule, t=1)
    assert not schedule.await_release(0)
    turn = schedule.take()
    assert turn is not None
    assert not schedule.await_release(0)
    schedule.read(turn, _MB, then=Step.REREAD)
    assert not schedule.await_release(0)
    turn = schedule.take()
    assert turn is not None
    schedule.advance(turn, Step.COMMIT)
    assert schedule.await_release(0)


def test_a_dropped_table_gets_no_more_steps() -> None:
    schedule = Schedule([("bad", 0), ("good", 0)])
    _open(schedule, bad=4, good=1)
    turn = schedule.take()
    assert turn is not None
    while turn.queue.table != "bad":
        schedule.read(turn, _MB, then=Step.COMMIT)
        turn = schedule.take()
        assert turn is not None
        if turn.step is Step.COMMIT:
            schedule.advance(turn, Step.DONE)
            turn = schedule.take()
            assert turn is not None
    schedule.drop(turn)
    assert all(name == "good" for name, _ in _steps(schedule))
    assert schedule.unfinished == []


def test_a_run_that_is_to_end_gives_no_more_chunks() -> None:
    stopping = threading.Event()
    schedule = Schedule([("t", 0)], is_stopping=stopping.is_set)
    _open(schedule, t=2)
    stopping.set()
    assert schedule.take() is None
    assert schedule.await_release(0)
