"""The queue between the reading thread and the consumer: bounded, in order, and the error last."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from penstock.connectors.feed import ChangedRows, Copied, CopiedRows, Reached, Step, StepQueue, grouped
from penstock.position import Position
from penstock.schema import TableName

TABLE = TableName("public", "t")


def rows(*values: int) -> CopiedRows:
    return CopiedRows(TABLE, pa.RecordBatch.from_pydict({"id": list(values)}))


def reached(position: int) -> Reached:
    return Reached(Position.of(position))


def ids(step: Step | None) -> list[int]:
    assert isinstance(step, CopiedRows | ChangedRows)
    return [int(each) for each in step.records.column("id").to_pylist()]


def test_rows_are_returned_in_parts_of_at_most_the_requested_size() -> None:
    queue = StepQueue(threading.Event())
    queue.put([rows(1, 2, 3, 4, 5), reached(7)])
    assert [ids(queue.take(2)), ids(queue.take(2))] == [[1, 2], [3, 4]]
    assert queue.take_mark() is None, "rows first"
    assert ids(queue.take(2)) == [5]
    assert queue.take_mark() == reached(7)
    assert queue.take_mark() is None


def test_a_step_that_is_put_back_is_the_next_one_and_is_cut_to_the_requested_size() -> None:
    queue = StepQueue(threading.Event())
    queue.put([rows(1, 2, 3), reached(7)])
    step = queue.take(3)
    assert step is not None
    queue.put_back(step)
    assert [ids(queue.take(1)), ids(queue.take(5))] == [[1], [2, 3]]
    assert queue.take_mark() == reached(7)


def test_the_event_is_set_while_there_is_something() -> None:
    ready = threading.Event()
    queue = StepQueue(ready)
    assert queue.take(1) is None
    assert not ready.is_set()
    queue.put([rows(1)])
    assert ready.is_set()
    queue.take(1)
    assert ready.is_set(), "no caller has waited in vain"
    assert queue.take(1) is None
    assert not ready.is_set()


def test_the_error_is_raised_after_all_earlier_items_and_again() -> None:
    ready = threading.Event()
    queue = StepQueue(ready)
    queue.put([rows(1)])
    queue.fail(RuntimeError("over"))
    assert ids(queue.take(1)) == [1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="over"):
            queue.take(1)
    assert ready.is_set()


def test_who_puts_waits_for_room_and_a_closed_queue_lets_him_go() -> None:
    queue = StepQueue(threading.Event(), max_bytes=1)
    assert queue.put([rows(1, 2, 3)]), "an empty queue takes anything"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.put, [rows(4)])
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        assert ids(queue.take(2)) == [1, 2]
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        assert ids(queue.take(2)) == [3]
        assert waiting.result(10)
        waiting = pool.submit(queue.put, [rows(5)])
        queue.close()
        assert not waiting.result(10)


def test_waiting_reader_of_an_empty_queue_is_woken_by_a_final_mark() -> None:
    queue = StepQueue(threading.Event(), max_bytes=1)
    queue.put([rows(1, 2, 3), reached(7)])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.put, [rows(4, 5)])
        assert ids(queue.take(3)) == [1, 2, 3]
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        assert queue.take_mark() == reached(7)
        try:
            assert waiting.result(10)
        finally:
            queue.close()  # so that a waiting thread does not block the end of the test


def test_idle_wal_takes_one_place_however_long_it_is_not_read() -> None:
    queue = StepQueue(threading.Event(), max_steps=2)
    for position in range(1, 100):
        assert queue.put([reached(position)])
    assert queue.take(1) == reached(99)
    assert queue.take(1) is None


def test_rows_are_returned_with_the_position_they_reach() -> None:
    copied = Copied(TABLE, Position.of(5))
    one, two = rows(1), rows(2)
    assert list(grouped([one, two, copied, reached(7), rows(3)]))[:2] == [(one,), (two, copied, reached(7))]
    assert list(grouped([reached(7)])) == [(reached(7),)]
    assert list(grouped([])) == []
