"""The reference table conformance suite fails for implementations that break a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pyarrow as pa
import pytest
from typing_extensions import override

from examples.list_reference import ListReference
from penstock.change import CHANGE_TYPE, ORDINAL, ChangeType
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import ReferenceTableSource
from penstock.errors import ConnectionLostError
from penstock.testing.reference_conformance import ReferenceTableConformance
from penstock.testing.rules import suite_tests
from tests.support.contract.breaking import caught, caught_by
from tests.support.contract.list_harnesses import LedgerHarness

SUITE = ReferenceTableConformance

# --- the snapshot -------------------------------------------------------------------------------------------


@caught_by(
    SUITE.test_snapshot_returns_every_row_once_and_then_none,
    SUITE.test_complete_snapshot_stays_complete_after_later_changes,
)
class BeginsAgain(ListReference):
    """Starts again if it is called after the end."""

    @override
    def poll_snapshot(self) -> pa.RecordBatch | None:
        if self._version is not None:
            self._version = self._snapshot = None
        return super().poll_snapshot()


@caught_by(SUITE.test_none_is_returned_only_when_the_snapshot_is_complete)
class IsCompleteTooEarly(ListReference):
    @override
    def is_snapshot_complete(self) -> bool:
        return self._snapshot is not None


@caught_by(SUITE.test_empty_table_is_complete_at_once)
class WaitsForRows(ListReference):
    """Treats an empty table as one whose rows have not arrived yet."""

    @override
    def is_snapshot_complete(self) -> bool:
        return super().is_snapshot_complete() and bool(self._ledger.rows_at(self._fence))


@caught_by(SUITE.test_complete_snapshot_stays_complete_after_later_changes)
class CompleteUntilTheNextChange(ListReference):
    @override
    def is_snapshot_complete(self) -> bool:
        return self._version == self._fence


@caught_by(SUITE.test_schema_is_known_before_the_first_poll)
class TakesItsShapeFromTheRows(ListReference):
    @override
    def schema(self) -> pa.Schema:
        return pa.schema([]) if self._snapshot is None else super().schema()


@caught_by(SUITE.test_snapshot_and_changes_leave_no_gap)
class FenceAtTheEnd(ListReference):
    """Continues at the source's position at the end of the snapshot, not at its beginning."""

    @override
    def poll_snapshot(self) -> pa.RecordBatch | None:
        batch = super().poll_snapshot()
        if batch is None and self._version is not None:
            self._version = len(self._ledger.transactions)
        return batch


# --- the changes --------------------------------------------------------------------------------------------


class Leaves(ListReference):
    """Leaves out changes of one kind."""

    kind: ChangeType

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        while (batch := super().poll_changes()) is not None:
            if batch.column(CHANGE_TYPE)[0].as_py() != self.kind:
                return batch
        return None


@caught_by(SUITE.test_changes_keep_the_table_current)
class LeavesDeletesOut(Leaves):
    kind = ChangeType.DELETE


@caught_by(SUITE.test_truncate_takes_every_row)
class LeavesTruncatesOut(Leaves):
    kind = ChangeType.TRUNCATE


@caught_by(SUITE.test_none_does_not_end_the_changes)
class EndsWithTheFirstNone(ListReference):
    """Treats one empty answer as the end."""

    _is_over = False

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        batch = None if self._is_over else super().poll_changes()
        self._is_over = batch is None
        return batch


@caught_by(SUITE.test_changes_are_ordered_by_version_and_ordinal)
class EveryRowIsTheFirst(ListReference):
    """Separates transactions, but not the changes of one."""

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        batch = super().poll_changes()
        if batch is None:
            return None
        at = batch.schema.names.index(ORDINAL)
        return batch.set_column(
            at, batch.schema.field(at), pa.array([0] * batch.num_rows, batch.schema.field(at).type)
        )


@caught_by(SUITE.test_changes_before_the_end_of_the_snapshot_are_refused)
class ChangesAtAnyTime(ListReference):
    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        return super().poll_changes() if self._version is not None else None


# --- checkpoint and restore ---------------------------------------------------------------------------------


@caught_by(SUITE.test_checkpoint_before_anything_is_the_beginning)
class BeginsAtTheEnd(ListReference):
    """A new reader continues at the end."""

    @override
    def checkpoint(self) -> SourceCheckpoint:
        version = len(self._ledger.transactions) if self._version is None else self._version
        return SourceCheckpoint({"version": str(version)}, version)


@caught_by(SUITE.test_checkpoint_covers_delivered_changes)
class CheckpointsLagBehind(ListReference):
    @override
    def checkpoint(self) -> SourceCheckpoint:
        version = None if self._version is None else max(self._fence, self._version - 1)
        return SourceCheckpoint({} if version is None else {"version": str(version)}, version or 0)


@caught_by(SUITE.test_older_checkpoint_redelivers_all_later_changes)
class NeverGoesBack(ListReference):
    """Continues at the last position of the source, whatever the checkpoint says."""

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        last = vars(self._ledger).setdefault("last", 0)
        self._version = max(self._version or 0, last)
        batch = super().poll_changes()
        vars(self._ledger)["last"] = self._version
        return batch


@caught_by(SUITE.test_only_confirm_acknowledges)
class RestoringReleases(ListReference):
    """Continues after the latest checkpoint that was restored: its changes were released."""

    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        super().restore(checkpoint)
        ledger = vars(self._ledger)
        self._version = ledger["released"] = max(self._version or 0, ledger.get("released", 0))


@caught_by(SUITE.test_confirming_keeps_later_changes)
class ConfirmingSkips(ListReference):
    """Releases everything, including later changes."""

    @override
    def confirm(self, checkpoint: SourceCheckpoint) -> None:
        self._version = len(self._ledger.transactions) + 1


@caught_by(SUITE.test_checkpoint_has_no_effect_and_is_plain)
class CheckpointsSkip(ListReference):
    @override
    def checkpoint(self) -> SourceCheckpoint:
        if self._version is not None:
            self._version += 1
        return super().checkpoint()


@caught_by(SUITE.test_checkpoint_covers_only_delivered_changes)
class CheckpointsRunAhead(ListReference):
    """Returns the source's position instead of the consumer's."""

    @override
    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(
            {} if self._version is None else {"version": str(len(self._ledger.transactions))}
        )


@caught_by(SUITE.test_table_is_consistent_whenever_the_checkpoint_moves)
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
        return (
            SourceCheckpoint({"version": str(self._fence)})
            if self._snapshot is not None
            else SourceCheckpoint()
        )


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


@caught_by(SUITE.test_transaction_interrupted_by_an_error_is_redelivered_from_its_beginning)
class GoesOnInTheMiddle(ListReference):
    """Treats a partly delivered transaction as done although an error followed."""

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


# --- closing ------------------------------------------------------------------------------------------------


@caught_by(SUITE.test_closed_source_refuses_polls, SUITE.test_with_block_closes)
class NeverCloses(ListReference):
    @override
    def close(self) -> None:
        """The call is ignored."""


@caught_by(SUITE.test_close_may_come_at_any_time_and_more_than_once)
class ClosesOnce(ListReference):
    @override
    def close(self) -> None:
        assert not self._is_closed
        super().close()


@caught_by(SUITE.test_source_that_is_dropped_without_close_releases_everything)
class LivesUntilItIsClosed(ListReference):
    """A list of the open sources keeps each of them alive."""

    opened: ClassVar[list[ListReference]] = []

    @override
    def poll_snapshot(self) -> pa.RecordBatch | None:
        self.opened.append(self)
        return super().poll_snapshot()


class BrokenHarness(LedgerHarness):
    deadline_seconds = 0.3

    def __init__(self, broken: type[ListReference]) -> None:
        super().__init__()
        self._broken = broken

    @override
    def source(self) -> ReferenceTableSource:
        return self._broken(self.ledger)

    @override
    def open_resources(self) -> object:
        return len(LivesUntilItIsClosed.opened)


@pytest.mark.parametrize("test", list(suite_tests(SUITE)))
def test_broken_implementation_fails_the_suite(test: Callable[..., object]) -> None:
    assert caught.get(test), "no implementation is known that breaks this rule: is it one?"
    for broken in caught[test]:
        with pytest.raises(AssertionError):
            test(SUITE(), BrokenHarness(broken))
