"""The capture conformance suite fails for implementations that break a rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
from typing_extensions import override

from examples.list_capture import ListCapture
from penstock.contracts.capture import (
    UNTRACKED,
    Ack,
    Change,
    ChangeCapture,
    ChangeStream,
    Delete,
    Truncate,
    Upsert,
)
from penstock.schema import TableName
from penstock.testing.capture_conformance import ChangeCaptureConformance
from tests.support.contract.list_harnesses import ListHarness

SUITE = ChangeCaptureConformance

caught: dict[str, list[type[ListCapture]]] = {}


def caught_by(*tests: Callable[..., object]) -> Callable[[type[ListCapture]], type[ListCapture]]:
    def note(broken: type[ListCapture]) -> type[ListCapture]:
        for test in tests:
            caught.setdefault(test.__name__, []).append(broken)
        return broken

    return note


class CallbackAck(Ack):
    def __init__(self, confirm: Callable[[], object]) -> None:
        self._confirm = confirm

    @override
    def confirm(self) -> None:
        self._confirm()


class AlteredCapture(ListCapture):
    """Returns modified changes."""

    def alter(self, change: Change) -> Iterator[Change]:
        yield change

    @override
    def _follow(self, at: int) -> Generator[Change]:
        for change in super()._follow(at):
            yield from self.alter(change)


def index(change: Change) -> int:
    assert change.commit is not None
    return change.commit.position.value


# --- the resume point ---------------------------------------------------------------------------------------


@caught_by(
    SUITE.test_unconfirmed_change_holds_the_resume_point,
    SUITE.test_partly_confirmed_transaction_is_redelivered_completely,
)
class EveryAckMovesThePoint(AlteredCapture):
    """Confirming a change confirms everything before it."""

    @override
    def alter(self, change: Change) -> Iterator[Change]:
        def move() -> None:
            self._journal.resume = index(change) + 1

        yield replace(change, ack=CallbackAck(move))


@caught_by(SUITE.test_order_of_confirming_does_not_matter)
class OnlyTheNextAckMovesThePoint(AlteredCapture):
    """Loses changes that were confirmed too early."""

    @override
    def alter(self, change: Change) -> Iterator[Change]:
        def move() -> None:
            if self._journal.resume == index(change):
                self._journal.resume += 1

        yield replace(change, ack=CallbackAck(move))


@caught_by(SUITE.test_confirming_is_idempotent)
class CountsAcks(AlteredCapture):
    @override
    def alter(self, change: Change) -> Iterator[Change]:
        def move() -> None:
            assert self._journal.resume is not None
            self._journal.resume += 1

        yield replace(change, ack=CallbackAck(move))


@caught_by(
    SUITE.test_unconfirmed_changes_are_redelivered_after_every_restart,
    SUITE.test_redelivered_changes_can_be_confirmed,
)
class ReceivingIsConfirming(AlteredCapture):
    @override
    def alter(self, change: Change) -> Iterator[Change]:
        self._journal.resume = index(change) + 1
        yield change


@caught_by(
    SUITE.test_confirmed_changes_are_not_redelivered,
    SUITE.test_resume_point_moves_to_the_first_unconfirmed_change,
    SUITE.test_any_thread_may_confirm,
    SUITE.test_lag_grows_with_unconfirmed_changes_and_shrinks_when_they_are_confirmed,
)
class ThePointNeverMoves(AlteredCapture):
    @override
    def alter(self, change: Change) -> Iterator[Change]:
        yield replace(change, ack=UNTRACKED)


@caught_by(SUITE.test_confirming_after_the_end_does_no_harm)
class RefusesLateAcks(ListCapture):
    @override
    def _follow(self, at: int) -> Generator[Change]:
        is_over: list[bool] = []

        def refuse(ack: Ack) -> None:
            if is_over:
                raise RuntimeError("the stream is closed")
            ack.confirm()

        try:
            for change in super()._follow(at):
                yield replace(change, ack=CallbackAck(partial(refuse, change.ack)))
        finally:
            is_over.append(True)


@caught_by(SUITE.test_resume_point_advances_with_unrelated_commits)
class StandsStillOnQuietGround(ListCapture):
    @override
    def _follow(self, at: int) -> Generator[Change]:
        for change in super()._follow(at):
            yield replace(change, ack=CallbackAck(partial(self._confirm, change)))

    def _confirm(self, change: Change) -> None:
        self._journal.resume = index(change) + 1


# --- what is delivered --------------------------------------------------------------------------------------


@caught_by(
    SUITE.test_everything_that_commits_after_live_returned_is_delivered_in_order,
    SUITE.test_live_stream_and_snapshot_leave_no_gap,
)
class BeginsWhenItIsRead(ListCapture):
    @override
    def live(self) -> Generator[Change]:
        yield from super().live()


@caught_by(SUITE.test_truncate_is_delivered_in_order)
class DropsTruncate(AlteredCapture):
    @override
    def alter(self, change: Change) -> Iterator[Change]:
        if isinstance(change.event, Truncate):
            change.ack.confirm()
        else:
            yield change


@caught_by(SUITE.test_empty_and_negative_keys_and_values_are_delivered)
class SkipsKeysBelowOne(AlteredCapture):
    @override
    def alter(self, change: Change) -> Iterator[Change]:
        if not isinstance(change.event, Upsert) or int(str(change.event.key["id"])) > 0:
            yield change


@caught_by(SUITE.test_empty_and_negative_keys_and_values_are_delivered)
class TakesNullForUnchanged(AlteredCapture):
    @override
    def alter(self, change: Change) -> Iterator[Change]:
        if isinstance(change.event, Upsert) and change.event.row["note"] is None:
            change = replace(change, event=replace(change.event, unchanged=frozenset({"note"})))
        yield change


@caught_by(SUITE.test_changes_are_ordered_by_commit_and_ordinal)
class OrdersByCommitAlone(AlteredCapture):
    @override
    def alter(self, change: Change) -> Iterator[Change]:
        assert change.commit is not None
        yield replace(change, commit=replace(change.commit, ordinal=0))


# --- resources ----------------------------------------------------------------------------------------------


class OneAtATime(ListCapture):
    """All streams share one list of unread changes."""

    @property
    def turnstile(self) -> list[object]:
        return vars(self._journal).setdefault("turnstile", [])  # type: ignore[no-any-return]


@caught_by(
    SUITE.test_closing_releases_everything,
    SUITE.test_breaking_out_of_the_loop_releases_everything,
    SUITE.test_dropping_a_stream_releases_everything,
)
class NeverLetsGo(OneAtATime):
    @override
    def _follow(self, at: int) -> Generator[Change]:
        self.turnstile.append("taken")
        yield from super()._follow(at)


@caught_by(SUITE.test_closing_a_stream_that_was_never_read_releases_everything)
class LetsGoOnlyWhatWasRead(OneAtATime):
    """A generator that was not started has nothing to clean up."""

    @override
    def live(self) -> Generator[Change]:
        self.turnstile.append("taken")
        return self._held(super().live())

    def _held(self, changes: Generator[Change]) -> Generator[Change]:
        try:
            yield from changes
        finally:
            self.turnstile.pop()


class Once:
    """A stream that ignores `close` once and continues."""

    def __init__(self, changes: Generator[Change]) -> None:
        self._changes = changes
        self._is_closed = False

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> Change:
        return next(self._changes)

    def close(self) -> None:
        assert not self._is_closed
        self._is_closed = True


@caught_by(SUITE.test_stream_is_an_iterator_that_can_be_closed_more_than_once)
class ClosesOnce(ListCapture):
    @override
    def live(self) -> ChangeStream:  # type: ignore[override]
        return Once(super().live())


# --- snapshots and lag --------------------------------------------------------------------------------------


@caught_by(SUITE.test_acks_of_a_snapshot_do_not_move_the_resume_point)
class SnapshotMovesThePoint(ListCapture):
    @override
    def snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        def move() -> None:
            self._journal.resume = len(self._journal.transactions)

        for change in super().snapshot(tables):
            yield replace(change, ack=CallbackAck(move))


@caught_by(SUITE.test_snapshot_returns_the_current_rows_as_upserts_and_ends)
class SnapshotMarksItsEnd(ListCapture):
    @override
    def snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        yield from super().snapshot(tables)
        yield Change(Delete(tables[0] if tables else TableName("", ""), {"id": None}), UNTRACKED)


@caught_by(SUITE.test_snapshot_has_only_the_requested_tables)
class SnapshotOfEverything(ListCapture):
    @override
    def snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        yield from super().snapshot(list(self._tables))


@caught_by(SUITE.test_snapshot_can_be_closed_early)
class SnapshotHoldsOn(OneAtATime):
    @override
    def snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        self.turnstile.append("taken")
        yield from super().snapshot(tables)
        self.turnstile.pop()


@caught_by(SUITE.test_snapshot_can_be_closed_early)
class SnapshotGoesOn(ListCapture):
    """The rows of a snapshot stay readable after the snapshot is closed."""

    @override
    def snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        given = vars(self._journal).setdefault("given", [0])
        for change in islice(super().snapshot(tables), given[0], None):
            given[0] += 1
            yield change


@caught_by(SUITE.test_lag_is_unknown_until_there_is_a_resume_point)
class LagFromNowhere(ListCapture):
    @override
    def lag(self) -> int | None:
        return super().lag() or 0


# --- and they are caught ------------------------------------------------------------------------------------


class BrokenHarness(ListHarness):
    deadline_seconds = 0.3

    def __init__(self, broken: type[ListCapture]) -> None:
        super().__init__()
        self._broken = broken

    @override
    def capture(self) -> ChangeCapture:
        return self._broken(self.journal, frozenset({self.table, self.other}))

    @override
    def open_resources(self) -> object:
        return list(vars(self.journal).get("turnstile", []))


TESTS = [name for name, _ in inspect.getmembers(SUITE, inspect.isfunction) if name.startswith("test_")]


@pytest.mark.parametrize("test", TESTS)
def test_broken_implementation_fails_the_suite(test: str) -> None:
    assert caught.get(test), "no implementation is known that breaks this rule: is it one?"
    for broken in caught[test]:
        run = getattr(SUITE(), test)
        with pytest.raises((AssertionError, RuntimeError)):
            run(BrokenHarness(broken))


def test_capture_without_snapshots_and_lag_keeps_the_defaults() -> None:
    class LiveOnly(ChangeCapture):
        def __init__(self, inner: ListCapture) -> None:
            self._inner = inner

        @override
        def live(self) -> ChangeStream:
            return self._inner.live()

    class LiveOnlyHarness(ListHarness):
        takes_snapshots = False
        measures_lag = False

        @override
        def capture(self) -> ChangeCapture:
            return LiveOnly(ListCapture(self.journal, frozenset({self.table, self.other})))

    harness = LiveOnlyHarness()
    assert list(harness.capture().snapshot([harness.table])) == []
    assert harness.capture().lag() is None
    for test in TESTS:
        getattr(SUITE(), test)(LiveOnlyHarness())
