"""The rules of `Snapshotter` and `CdcIterator`, as tests that any implementation can run.

Used as `ChangeCaptureConformance` is: write the harness, and give it as the fixture `harness`, fresh for each test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from penstock.contracts.capture import Event, Upsert
from penstock.contracts.records import OPERATION, TABLE, CdcIterator, Operation, Record, RecordPosition, Snapshotter
from penstock.errors import NoRowsError, SnapshotInterruptedError
from penstock.schema import TableName
from penstock.testing.rules import rule
from penstock.testing.streams import Background, wait_for

Failure = TypeVar("Failure", bound=Exception)

_MOMENT_SECONDS = 0.3
"""In which whoever does not wait has long been done."""


class TableHarness(ABC):
    """A source with an empty table of the columns `id` (a number, the key) and `note` (a text or NULL)."""

    table = TableName("public", "conformance")
    deadline_seconds = 30.0

    @abstractmethod
    def commit(self, *events: Event) -> None:
        """Make these things happen in one transaction, and return when it has committed. An upsert may find its row there or not."""

    def open_resources(self) -> object:
        """What is open now: connections, threads, whatever can be counted. It must be the same after a teardown as before."""
        return None

    def insert(self, *keys: int) -> None:
        self.commit(*(Upsert(self.table, {"id": key}, {"id": key, "note": f"note {key}"}) for key in keys))


class SnapshotterHarness(TableHarness):
    @abstractmethod
    def snapshotter(self) -> Snapshotter:
        """Of the table as it is now."""


class SnapshotterConformance:
    """Every rule of the contract has a test here, and its name says which."""

    @rule("record_source", "Snapshotter()", "Snapshotter.has_next()", "Snapshotter.next()", "initial", "loads", "another-row", "next-row")
    def test_snapshot_is_the_rows_of_the_moment_at_which_it_was_made(self, harness: SnapshotterHarness) -> None:
        harness.insert(-1, 0, 1, 2)
        snapshotter = harness.snapshotter()
        harness.insert(3)
        harness.commit(Upsert(harness.table, {"id": 1}, {"id": 1, "note": "later"}))
        records = read_through(snapshotter)
        assert {record.key["id"]: (record.payload or {}).get("note") for record in records} == {key: f"note {key}" for key in (-1, 0, 1, 2)}
        assert {record.operation for record in records} == {Operation.SNAPSHOT}
        assert len({record.position for record in records}) == len(records), "no two records have one position"
        snapshotter.teardown()

    @rule("record_source", "increments-position")
    def test_asking_again_passes_over_nothing(self, harness: SnapshotterHarness) -> None:
        harness.insert(1, 2)
        snapshotter = harness.snapshotter()
        found = []
        while snapshotter.has_next() and snapshotter.has_next() and snapshotter.has_next():
            found.append(snapshotter.next().key["id"])
        assert sorted(map(str, found)) == ["1", "2"]
        snapshotter.teardown()

    @rule("record_source", "has-next-first")
    def test_next_without_has_next_fails_and_loses_nothing(self, harness: SnapshotterHarness) -> None:
        harness.insert(1, 2)
        snapshotter = harness.snapshotter()
        raises(NoRowsError, snapshotter.next)
        assert snapshotter.has_next()
        snapshotter.next()
        raises(NoRowsError, snapshotter.next)
        assert len(read_through(snapshotter)) == 1
        snapshotter.teardown()

    @rule("record_source", "no-rows", "next-complete", "next-after-false")
    def test_next_after_the_end_raises_every_time(self, harness: SnapshotterHarness) -> None:
        harness.insert(1)
        snapshotter = harness.snapshotter()
        read_through(snapshotter)
        for _ in range(2):
            raises(NoRowsError, snapshotter.next)
            assert not snapshotter.has_next()
        snapshotter.teardown()

    @rule("record_source", "no-rows", "next-no-rows", "marks-complete")
    def test_empty_table_is_complete_once_it_was_asked(self, harness: SnapshotterHarness) -> None:
        snapshotter = harness.snapshotter()
        assert not snapshotter.has_next()
        raises(NoRowsError, snapshotter.next)
        snapshotter.teardown()

    @rule("record_source", "Snapshotter.teardown()", "interrupt", "in-progress", "teardown-incomplete", "teardown-cleans", "teardown-first")
    def test_teardown_in_the_middle_says_so_after_closing_everything(self, harness: SnapshotterHarness) -> None:
        harness.insert(1, 2, 3)
        before = harness.open_resources()
        snapshotter = harness.snapshotter()
        assert snapshotter.has_next()
        snapshotter.next()
        raises(SnapshotInterruptedError, snapshotter.teardown)
        check_as_before(harness, before)
        snapshotter.teardown()
        raises(NoRowsError, snapshotter.next)
        assert not snapshotter.has_next()

    @rule("record_source", "in-progress")
    def test_teardown_before_the_first_row_is_in_the_middle_too(self, harness: SnapshotterHarness) -> None:
        harness.insert(1)
        before = harness.open_resources()
        raises(SnapshotInterruptedError, harness.snapshotter().teardown)
        check_as_before(harness, before)

    @rule("record_source", "marks-complete")
    def test_it_is_has_next_that_completes_a_snapshot(self, harness: SnapshotterHarness) -> None:
        harness.insert(1)
        snapshotter = harness.snapshotter()
        assert snapshotter.has_next()
        snapshotter.next()
        raises(SnapshotInterruptedError, snapshotter.teardown)

    @rule("record_source", "Snapshotter.teardown()", "teardown-by-caller", "teardown-cleans")
    def test_teardown_of_a_complete_snapshot_is_the_callers_and_silent(self, harness: SnapshotterHarness) -> None:
        harness.insert(1, 2)
        before = harness.open_resources()
        snapshotter = harness.snapshotter()
        read_through(snapshotter)
        assert not snapshotter.has_next(), "it can be asked until it is torn down"
        snapshotter.teardown()
        snapshotter.teardown()
        check_as_before(harness, before)

    @rule("record_source", "is-iterator")
    def test_snapshot_is_a_context_and_can_be_iterated(self, harness: SnapshotterHarness) -> None:
        harness.insert(1, 2)
        with harness.snapshotter() as snapshotter:
            assert len(list(snapshotter)) == 2
        raises(SnapshotInterruptedError, lambda: leave(harness.snapshotter()))
        raises(KeyError, lambda: leave(harness.snapshotter(), KeyError()))


class IteratorHarness(ABC):
    deadline_seconds = 30.0
    capacity = 256
    """How many records the iterator takes at most before a push waits."""

    @abstractmethod
    def iterator(self) -> CdcIterator:
        """An empty one, as it is before anything was pushed."""


class CdcIteratorConformance:
    """Every rule of the contract has a test here, and its name says which."""

    @rule("record_source", "CdcIterator()", "CdcIterator.has_next()", "in-buffer", "new-iterator")
    def test_has_next_tells_whether_a_record_is_there_now(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        assert not iterator.has_next()
        iterator.push(a_record(1))
        assert iterator.has_next()
        assert iterator.has_next()
        iterator.next()
        assert not iterator.has_next()

    @rule("record_source", "CdcIterator.next()", "CdcIterator.push()", "push-appends", "next-in-buffer", "one-record")
    def test_records_come_one_at_a_time_in_the_order_in_which_they_were_pushed(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        records = [a_record(number) for number in range(min(harness.capacity, 5))]
        for record in records:
            iterator.push(record)
        assert [iterator.next() for _ in records] == records
        iterator.push(records[0])
        assert list(iterator) == [records[0]], "iterated, it is what there is now"

    @rule("record_source", "next-blocks")
    def test_next_waits_for_a_push(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        waiting = Background(iterator.next)
        assert not waiting.is_over(_MOMENT_SECONDS), "there was nothing to give"
        assert not iterator.has_next()
        iterator.push(a_record(7))
        assert waiting.result(harness.deadline_seconds, "the record that was pushed") == a_record(7)

    def test_whoever_reads_slowly_slows_who_pushes(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        total = harness.capacity * 4 + 10
        pushed: list[int] = []

        def push_all() -> None:
            for number in range(total):
                iterator.push(a_record(number))
                pushed.append(number)

        pushing = Background(push_all)
        wait_for(lambda: len(pushed) >= harness.capacity, "a full buffer", lambda: len(pushed), harness.deadline_seconds)
        for number in range(total):
            # One may have been pushed and not been counted yet; what was read has left.
            assert len(pushed) - number <= harness.capacity, "the buffer has no bounds"
            record = Background(iterator.next).result(harness.deadline_seconds, "a record")
            assert record == a_record(number)
        pushing.result(harness.deadline_seconds, "the last push")

    @rule("record_source", "CdcIterator.teardown()", "teardown-noop", "no-rows")
    def test_teardown_raises_nothing_and_wakes_who_waits(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        waiting = [Background(iterator.next) for _ in range(2)]
        iterator.teardown()
        iterator.teardown()
        for each in waiting:
            raises(NoRowsError, partial(each.result, harness.deadline_seconds, "the end of a next"))
        raises(NoRowsError, lambda: Background(iterator.next).result(harness.deadline_seconds, "the end of a next"))
        raises(NoRowsError, lambda: iterator.push(a_record(1)))
        assert not iterator.has_next()

    @rule("record_source", "CdcIterator.teardown()")
    def test_teardown_wakes_who_pushes_into_a_full_buffer(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        for number in range(harness.capacity):
            iterator.push(a_record(number))
        pushing = Background(lambda: iterator.push(a_record(-1)))
        assert not pushing.is_over(_MOMENT_SECONDS), "there was no room"
        iterator.teardown()
        raises(NoRowsError, lambda: pushing.result(harness.deadline_seconds, "the end of a push"))


# --- what the tests are made of -----------------------------------------------------------------------------------------------


def a_record(number: int) -> Record:
    metadata = {OPERATION: Operation.UPSERT.value, TABLE: "public.t"}
    return Record(RecordPosition(str(number)), {"id": number}, {"id": number}, metadata, datetime.fromtimestamp(0, UTC))


def read_through(snapshotter: Snapshotter) -> list[Record]:
    records = []
    while snapshotter.has_next():
        records.append(snapshotter.next())
    return records


def leave(snapshotter: Snapshotter, error: Exception | None = None) -> None:
    with snapshotter:
        if error is not None:
            raise error


def raises(kind: type[Failure], call: Callable[[], object]) -> Failure:
    """The error. Without pytest, which the suites do not need to be imported."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def check_as_before(harness: TableHarness, before: object) -> None:
    wait_for(lambda: harness.open_resources() == before, f"as before, {before},", harness.open_resources, harness.deadline_seconds)
