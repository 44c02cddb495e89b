"""The conformance suite itself: each of its tests catches somebody who breaks the rule that it names."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from typing_extensions import override

from examples.list_reference import ListReference
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import ReferenceTableSource
from penstock.errors import ConnectionLostError
from penstock.testing.reference_conformance import ReferenceTableConformance
from tests.contract.test_list_reference import LedgerHarness

SUITE = ReferenceTableConformance

caught: list[tuple[type[ListReference], str]] = []


def caught_by(*tests: Callable[..., object]) -> Callable[[type[ListReference]], type[ListReference]]:
    def note(broken: type[ListReference]) -> type[ListReference]:
        caught.extend((broken, test.__name__) for test in tests)
        return broken

    return note


@caught_by(SUITE.test_snapshot_is_every_row_once_and_then_none_for_good)
class BeginsAgain(ListReference):
    """Takes a call after the end for the beginning."""

    @override
    def poll_snapshot(self) -> pa.RecordBatch | None:
        if self._version is not None:
            self._version = self._snapshot = None
        return super().poll_snapshot()


@caught_by(SUITE.test_none_comes_only_when_the_snapshot_is_complete)
class IsCompleteTooEarly(ListReference):
    @override
    def is_snapshot_complete(self) -> bool:
        return self._snapshot is not None


@caught_by(SUITE.test_nothing_falls_between_snapshot_and_changes)
class FenceAtTheEnd(ListReference):
    """Follows from where the source is when the snapshot ends, not from where it was when it began."""

    @override
    def poll_snapshot(self) -> pa.RecordBatch | None:
        batch = super().poll_snapshot()
        if batch is None and self._version is not None:
            self._version = len(self._ledger.transactions)
        return batch


@caught_by(SUITE.test_changes_before_the_end_of_the_snapshot_are_refused)
class ChangesAtAnyTime(ListReference):
    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        return super().poll_changes() if self._version is not None else None


@caught_by(SUITE.test_checkpoint_has_no_effect_and_is_plain)
class CheckpointsSkip(ListReference):
    @override
    def checkpoint(self) -> SourceCheckpoint:
        if self._version is not None:
            self._version += 1
        return super().checkpoint()


@caught_by(SUITE.test_checkpoint_covers_only_what_was_delivered)
class CheckpointsRunAhead(ListReference):
    """Says how far the source is, not how far the consumer is."""

    @override
    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint({} if self._version is None else {"version": str(len(self._ledger.transactions))})


@caught_by(SUITE.test_table_is_whole_whenever_the_checkpoint_moves)
class MovesWithTheFirstRow(ListReference):
    """Moves its checkpoint before the last row of a transaction is delivered."""

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        batch = super().poll_changes()
        self._begun = bool(self._waiting)
        return batch

    @override
    def checkpoint(self) -> SourceCheckpoint:
        ahead = 1 if getattr(self, "_begun", False) else 0
        return SourceCheckpoint({} if self._version is None else {"version": str(self._version + ahead)})


@caught_by(SUITE.test_checkpoint_within_a_snapshot_covers_no_part_of_it)
class HalfASnapshotIsEnough(ListReference):
    @override
    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint({"version": str(self._fence)}) if self._snapshot is not None else SourceCheckpoint()


@caught_by(SUITE.test_restore_skips_a_finished_snapshot, SUITE.test_checkpoint_of_another_source_is_refused)
class RestoresNothing(ListReference):
    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._check_open()


@caught_by(SUITE.test_failure_to_read_is_an_error_and_not_an_end)
class TakesAnErrorForTheEnd(ListReference):
    @override
    def poll_snapshot(self) -> pa.RecordBatch | None:
        try:
            return super().poll_snapshot()
        except ConnectionLostError:
            self._version = self._fence
            return None


@caught_by(SUITE.test_transaction_that_an_error_breaks_off_comes_again_from_its_beginning)
class GoesOnInTheMiddle(ListReference):
    """Takes what was delivered of a transaction for done, although an error came after it."""

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        waiting = list(self._waiting)
        try:
            return super().poll_changes()
        except ConnectionLostError:
            self._waiting = waiting
            raise


@caught_by(SUITE.test_restore_after_the_first_poll_is_refused)
class RestoresAtAnyTime(ListReference):
    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._snapshot = self._version = None
        super().restore(checkpoint)


@caught_by(SUITE.test_closed_source_gives_nothing_out, SUITE.test_with_block_closes)
class NeverCloses(ListReference):
    @override
    def close(self) -> None:
        """Forgotten."""


@caught_by(SUITE.test_close_may_come_at_any_time_and_more_than_once)
class ClosesOnce(ListReference):
    @override
    def close(self) -> None:
        assert not self._is_closed
        super().close()


@pytest.mark.parametrize(("broken", "test"), caught, ids=lambda each: getattr(each, "__name__", each))
def test_suite_catches(broken: type[ListReference], test: str) -> None:
    class Harness(LedgerHarness):
        deadline_seconds = 0.3

        @override
        def source(self) -> ReferenceTableSource:
            return broken(self.ledger)

    with pytest.raises(AssertionError):
        getattr(SUITE(), test)(Harness())
