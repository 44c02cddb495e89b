"""The snapshot and buffer conformance suites fail for implementations that break a rule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import pytest
from typing_extensions import override

from examples.list_records import ListIterator, ListSnapshotter, Log
from penstock.contracts.records import CdcIterator, Record, Snapshotter
from penstock.errors import NoRowsError, PenstockError, SnapshotInterruptedError
from penstock.schema import TableName
from penstock.testing.records_conformance import CdcIteratorConformance, SnapshotterConformance
from penstock.testing.rules import suite_tests
from tests.support.contract.breaking import caught, caught_by
from tests.support.contract.list_harnesses import ListIteratorHarness, ListSnapshotterHarness

SNAPSHOTS, BUFFERS = SnapshotterConformance, CdcIteratorConformance


# --- snapshots ----------------------------------------------------------------------------------------------


@caught_by(SNAPSHOTS.test_snapshot_has_the_rows_of_its_creation_time)
class ReadsWhenItIsAsked(ListSnapshotter):
    def __init__(self, log: Log, table: TableName) -> None:
        super().__init__(log, table)
        self._log = log
        self._has_read = False

    @override
    def has_next(self) -> bool:
        if not self._has_read:
            self._has_read = True
            super().__init__(self._log, self._table)
            self._has_read = True
        return super().has_next()


@caught_by(SNAPSHOTS.test_repeated_has_next_skips_no_row)
class AskingIsReading(ListSnapshotter):
    @override
    def has_next(self) -> bool:
        self._found = None
        return super().has_next()


@caught_by(SNAPSHOTS.test_next_without_has_next_fails_and_loses_nothing)
class AsksByItself(ListSnapshotter):
    @override
    def next(self) -> Record:
        self.has_next()
        return super().next()


@caught_by(SNAPSHOTS.test_next_after_the_end_raises_every_time)
class GivesTheLastRowAgain(ListSnapshotter):
    last: Record

    @override
    def next(self) -> Record:
        with suppress(NoRowsError):
            self.last = super().next()
        return self.last


@caught_by(SNAPSHOTS.test_empty_table_is_complete_after_the_first_has_next)
class NothingIsAFailure(ListSnapshotter):
    @override
    def teardown(self) -> None:
        self._is_complete = self._is_complete and self._read > 0
        super().teardown()


@caught_by(SNAPSHOTS.test_teardown_of_an_incomplete_snapshot_raises_after_closing_everything)
class EndsInSilence(ListSnapshotter):
    @override
    def teardown(self) -> None:
        with suppress(SnapshotInterruptedError):
            super().teardown()


@caught_by(SNAPSHOTS.test_teardown_before_the_first_row_raises_too)
class NotBegunIsComplete(ListSnapshotter):
    @override
    def teardown(self) -> None:
        self._is_complete = self._is_complete or self._read == 0
        super().teardown()


@caught_by(SNAPSHOTS.test_has_next_completes_a_snapshot)
class TheLastRowCompletes(ListSnapshotter):
    @override
    def next(self) -> Record:
        record = super().next()
        self._is_complete = not self._rows
        return record


@caught_by(SNAPSHOTS.test_teardown_of_a_complete_snapshot_raises_nothing)
class AlwaysInterrupted(ListSnapshotter):
    @override
    def teardown(self) -> None:
        self._is_complete = False
        super().teardown()


@caught_by(SNAPSHOTS.test_snapshot_is_a_context_and_can_be_iterated)
class LeavesTheBlockOpen(ListSnapshotter):
    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


# --- buffers ------------------------------------------------------------------------------------------------


@caught_by(BUFFERS.test_has_next_returns_whether_a_record_is_available_now)
class AlwaysHopeful(ListIterator):
    @override
    def has_next(self) -> bool:
        return not self._is_closed


@caught_by(BUFFERS.test_records_are_returned_one_at_a_time_in_push_order)
class LastInFirstOut(ListIterator):
    @override
    def push(self, record: Record) -> None:
        super().push(record)
        self._records.rotate()


@caught_by(BUFFERS.test_next_waits_for_a_push)
class DoesNotWait(ListIterator):
    @override
    def next(self) -> Record:
        if not self._records:
            raise NoRowsError("nothing there")
        return super().next()


@caught_by(BUFFERS.test_slow_reader_blocks_the_pusher)
class TakesEverything(ListIterator):
    @override
    def push(self, record: Record) -> None:
        self._capacity += 1
        super().push(record)


@caught_by(
    BUFFERS.test_teardown_ends_waiting_reads_without_an_error,
    BUFFERS.test_teardown_ends_a_push_into_a_full_buffer,
)
class LetsThemSleep(ListIterator):
    @override
    def teardown(self) -> None:
        return


# --- and they are caught ------------------------------------------------------------------------------------


class BrokenSnapshotterHarness(ListSnapshotterHarness):
    deadline_seconds = 0.3

    def __init__(self, broken: type[ListSnapshotter]) -> None:
        super().__init__()
        self._broken = broken

    @override
    def snapshotter(self) -> Snapshotter:
        return self._broken(self.log, self.table)


class BrokenIteratorHarness(ListIteratorHarness):
    deadline_seconds = 0.3

    def __init__(self, broken: type[ListIterator]) -> None:
        self._broken = broken

    @override
    def iterator(self) -> CdcIterator:
        return self._broken(self.capacity)


HARNESSES: dict[type, Callable[..., object]] = {
    SNAPSHOTS: BrokenSnapshotterHarness,
    BUFFERS: BrokenIteratorHarness,
}


@pytest.mark.parametrize(
    ("suite", "test"),
    [(suite, test) for suite in HARNESSES for test in suite_tests(suite)],
    ids=lambda each: each.__name__,
)
def test_broken_implementation_fails_the_suite(suite: type, test: Callable[..., object]) -> None:
    assert caught.get(test), "no implementation is known that breaks this rule: is it one?"
    for broken in caught[test]:
        with pytest.raises((AssertionError, PenstockError)):
            test(suite(), HARNESSES[suite](broken))
