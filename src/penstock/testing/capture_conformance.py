"""Conformance suite for `ChangeCapture`.

Write a `CaptureHarness` for the source. In a pytest module, subclass the suite and return a new harness for
each test from the fixture `harness`:

```python
class TestMyCapture(ChangeCaptureConformance):
    @pytest.fixture
    def harness(self) -> MyHarness:
        return MyHarness()
```

For pytest to explain failed assertions, call
`pytest.register_assert_rewrite("penstock.testing.capture_conformance")` in a conftest.

A test reads exactly as many changes as it expects. To prove that there are no further changes, it commits a
marker row and reads up to that row. So there are no delays to tune. `examples/list_capture.py` is an
implementation of a hundred lines that passes the suite.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import islice, pairwise

from penstock.contracts.capture import (
    Ack,
    Change,
    ChangeCapture,
    ChangeStream,
    Delete,
    Event,
    Truncate,
    Upsert,
)
from penstock.schema import TableName
from penstock.testing.rules import rule
from penstock.testing.streams import (
    Background,
    check_same,
    check_same_set,
    seen,
    seen_event,
    take,
    take_until,
    wait_for,
)


class CaptureHarness(ABC):
    """The source behind a capture, with two empty tables. Columns: `id` (number, primary key) and `note`
    (text, nullable).
    """

    table = TableName("public", "conformance")
    other = TableName("public", "conformance_other")
    deadline_seconds = 30.0
    takes_snapshots = True
    measures_lag = True
    orders_changes = True
    """False if the changes of a transaction are not delivered in the source's order, as by a capture that
    compares rows instead of reading a log.
    """

    @abstractmethod
    def capture(self) -> ChangeCapture:
        """Return a new capture of both tables, as after a process start.

        All captures share one resume point.
        """

    @abstractmethod
    def commit(self, *events: Event) -> None:
        """Apply the events in one transaction and return after the commit. The row of an upsert may or may
        not exist.
        """

    @abstractmethod
    def commit_elsewhere(self) -> None:
        """Commit a noticeable amount of data that the capture does not deliver."""

    def open_resources(self) -> object:
        """The open resources, such as the number of connections and threads, as a comparable value.

        Must be equal before and after a stream.
        """
        return None


class ChangeCaptureConformance:
    """One test per rule of the contract; the test's name states the rule."""

    # --- delivery -------------------------------------------------------------------------------------------

    @rule("change_capture", "live()", "pluggable")
    @rule("wal_change_capture", "live()", "live-streams")
    def test_everything_that_commits_after_live_returned_is_delivered_in_order(
        self, harness: CaptureHarness
    ) -> None:
        table, other = harness.table, harness.other
        transactions: list[list[Event]] = [
            [upsert(table, 1, "one"), upsert(other, 1, "uno"), upsert(table, 2, "two")],
            [upsert(table, 1, "eins")],
            [upsert(other, 2, "due"), upsert(table, 3, "three"), delete(other, 1)],
            [delete(table, 2)],
            [upsert(table, 2, "again")],
        ]
        with running(harness) as stream:
            for events in transactions:
                harness.commit(*events)
            for events in transactions:
                found = take(stream, len(events), harness.deadline_seconds)
                if harness.orders_changes:
                    check_same(found, events, "every change is delivered once, in commit order")
                else:
                    check_same_set(
                        found, events, "every change is delivered once, before the next transaction"
                    )

    @rule("mistakes", "change-lsn")
    def test_changes_are_ordered_by_commit_and_ordinal(self, harness: CaptureHarness) -> None:
        with running(harness) as stream:
            harness.commit(*(upsert(harness.table, each, "x") for each in range(3)))
            harness.commit(*(upsert(harness.other, each, "x") for each in range(3)))
            places = [place(change) for change in take(stream, 6, harness.deadline_seconds)]
        if None not in places:
            known = [each for each in places if each is not None]
            assert all(one < next_one for one, next_one in pairwise(known)), (
                f"(position, ordinal) does not increase: {known}"
            )
            assert len({position for position, _ in known}) == 2, (
                f"expected two different positions for two transactions: {known}"
            )

    @rule("mistakes", "truncate")
    def test_truncate_is_delivered_in_order(self, harness: CaptureHarness) -> None:
        table = harness.table
        with running(harness) as stream:
            expected: list[Event] = [upsert(table, 1, "before"), Truncate(table), upsert(table, 2, "after")]
            for event in expected:
                harness.commit(event)
            check_same(
                take(stream, 3, harness.deadline_seconds),
                expected,
                "a truncate is delivered in order, as any change",
            )

    @rule("mistakes", "odd-keys")
    def test_empty_and_negative_keys_and_values_are_delivered(self, harness: CaptureHarness) -> None:
        with running(harness) as stream:
            expected = [
                upsert(harness.table, key, note)
                for key, note in [(0, ""), (-1, None), (1, "NULL"), (-(2**31), "\N{SNOWMAN}\n")]
            ]
            harness.commit(*expected)
            changes = take(stream, len(expected), harness.deadline_seconds)
            check_same(changes, expected, "zero, negative keys, empty strings and NULL are valid values")
            for event in (change.event for change in changes):
                assert isinstance(event, Upsert)
                assert not event.unchanged
                assert not event.exact

    # --- confirming -----------------------------------------------------------------------------------------

    @rule("change_capture", "acks")
    def test_unconfirmed_changes_are_redelivered_after_every_restart(self, harness: CaptureHarness) -> None:
        expected = [upsert(harness.table, each, "x") for each in range(3)]
        with running(harness) as stream:
            for event in expected:
                harness.commit(event)
            first = [place(change) for change in take(stream, 3, harness.deadline_seconds)]
        for _ in range(2):
            with running(harness) as stream:
                changes = take(stream, 3, harness.deadline_seconds)
                check_same(changes, expected, "unconfirmed changes are delivered again")
                assert [place(change) for change in changes] == first, (
                    "a redelivered change has the same position and ordinal"
                )

    @rule("change_capture", "acks", "live-resumes")
    @rule("wal_change_capture", "slots-resume")
    def test_confirmed_changes_are_not_redelivered(self, harness: CaptureHarness) -> None:
        deliver_three(harness, confirm=lambda changes: confirm_all(change.ack for change in changes))
        check_next(harness, [], "all changes were confirmed before the stream was closed")

    @rule("change_capture", "acks", "live-resumes")
    @rule("wal_change_capture", "connects")
    def test_resume_point_moves_to_the_first_unconfirmed_change(self, harness: CaptureHarness) -> None:
        events = deliver_three(harness, confirm=lambda changes: changes[0].ack.confirm())
        check_next(harness, events[1:], "only the first change was confirmed")

    def test_order_of_confirming_does_not_matter(self, harness: CaptureHarness) -> None:
        deliver_three(harness, confirm=lambda changes: [changes[at].ack.confirm() for at in (2, 0, 1)])
        check_next(harness, [], "all changes were confirmed")

    @rule("change_capture", "acks")
    def test_unconfirmed_change_holds_the_resume_point(self, harness: CaptureHarness) -> None:
        events = deliver_three(harness, confirm=lambda changes: [changes[at].ack.confirm() for at in (1, 2)])
        check_next(
            harness,
            events,
            "the first change was not confirmed, so it and all later ones are delivered again",
        )

    def test_confirming_is_idempotent(self, harness: CaptureHarness) -> None:
        events = deliver_three(harness, confirm=lambda changes: [changes[0].ack.confirm() for _ in range(3)])
        check_next(harness, events[1:], "only the first change was confirmed, three times")

    def test_partly_confirmed_transaction_is_redelivered_completely(self, harness: CaptureHarness) -> None:
        first, second = (
            upsert(harness.table, 1, "x"),
            [upsert(harness.table, 2, "x"), upsert(harness.other, 2, "x")],
        )
        with running(harness) as stream:
            harness.commit(first)
            harness.commit(*second)
            for change in take(stream, 3, harness.deadline_seconds)[:2]:
                change.ack.confirm()
        check_next(harness, second, "a capture cannot resume within a transaction")

    def test_any_thread_may_confirm(self, harness: CaptureHarness) -> None:
        with running(harness) as stream:
            harness.commit(*(upsert(harness.table, each, "x") for each in range(200)))
            acks = [change.ack for change in take(stream, 200, harness.deadline_seconds)]
            parts = [Background(partial(confirm_all, acks[at % 4 :: 4])) for at in range(8)]
            for part in parts:
                part.result(harness.deadline_seconds, "confirming")
        check_next(harness, [], "all changes were confirmed, each by two threads")

    def test_redelivered_changes_can_be_confirmed(self, harness: CaptureHarness) -> None:
        events = deliver_three(harness, confirm=lambda _: None)
        with running(harness) as stream:
            changes = take(stream, 3, harness.deadline_seconds)
            check_same(changes, events, "unconfirmed changes are delivered again")
            for change in changes[:2]:
                change.ack.confirm()
        check_next(harness, events[2:], "two changes were confirmed after redelivery")

    def test_confirming_after_the_end_does_no_harm(self, harness: CaptureHarness) -> None:
        with running(harness) as stream:
            harness.commit(upsert(harness.table, 1, "x"))
            changes = take(stream, 1, harness.deadline_seconds)
        changes[0].ack.confirm()
        mark = upsert(harness.table, 99, "mark")
        with running(harness) as stream:
            harness.commit(mark)
            found = [seen(change) for change in take_until(stream, mark, harness.deadline_seconds)]
        assert found in (
            [seen(changes[0]), (harness.table, "upsert", 99, "mark")],
            [(harness.table, "upsert", 99, "mark")],
        )

    # --- resources ------------------------------------------------------------------------------------------

    def test_stream_is_an_iterator_that_can_be_closed_more_than_once(self, harness: CaptureHarness) -> None:
        stream = harness.capture().live()
        assert isinstance(stream, ChangeStream)
        assert iter(stream) is stream
        stream.close()
        stream.close()
        assert (
            Background(lambda: next(stream, None)).result(
                harness.deadline_seconds, "the end of a closed stream"
            )
            is None
        )

    @rule("change_capture", "owned")
    def test_closing_releases_everything(self, harness: CaptureHarness) -> None:
        def read_and_close() -> None:
            with closing(harness.capture().live()) as stream:
                harness.commit(upsert(harness.table, 1, "x"))
                take(stream, 1, harness.deadline_seconds)

        check_released(harness, read_and_close)

    def test_closing_a_stream_that_was_never_read_releases_everything(self, harness: CaptureHarness) -> None:
        check_released(harness, lambda: harness.capture().live().close())

    def test_breaking_out_of_the_loop_releases_everything(self, harness: CaptureHarness) -> None:
        held: list[Change] = []

        def read_one() -> None:
            harness.capture().live().close()  # creates the resume point
            harness.commit(upsert(harness.table, 1, "x"))
            for change in harness.capture().live():
                held.append(change)
                break

        check_released(harness, lambda: Background(read_one).result(harness.deadline_seconds, "one change"))
        assert len(held) == 1

    @rule("change_capture", "owned")
    def test_dropping_a_stream_releases_everything(self, harness: CaptureHarness) -> None:
        def read_and_drop() -> None:
            stream = harness.capture().live()
            harness.commit(upsert(harness.table, 1, "x"))
            take(stream, 1, harness.deadline_seconds)

        check_released(harness, read_and_drop)

    # --- snapshots ------------------------------------------------------------------------------------------

    @rule("change_capture", "snapshot()", "snapshot-rows", "upserts", "no-marker")
    @rule("wal_change_capture", "snapshot()", "snapshot-sql", "snapshot-upserts")
    def test_snapshot_returns_the_current_rows_as_upserts_and_ends(self, harness: CaptureHarness) -> None:
        rows = [upsert(harness.table, each, f"note {each}") for each in range(-2, 300)]
        others = [upsert(harness.other, 1, None)]
        harness.commit(*rows, *others, upsert(harness.table, 999, "gone"))
        harness.commit(delete(harness.table, 999))
        found = [seen(change) for change in snapshot(harness, harness.table, harness.other)]
        expected = [seen_event(event) for event in [*rows, *others]] if harness.takes_snapshots else []
        assert sorted(found, key=repr) == sorted(expected, key=repr)

    @rule("change_capture", "snapshot-rows")
    def test_snapshot_has_only_the_requested_tables(self, harness: CaptureHarness) -> None:
        harness.commit(upsert(harness.table, 1, "x"))
        assert snapshot(harness, harness.other) == []
        assert snapshot(harness) == []

    @rule("change_capture", "snapshot-acks")
    def test_acks_of_a_snapshot_do_not_move_the_resume_point(self, harness: CaptureHarness) -> None:
        events = [upsert(harness.table, each, "x") for each in range(3)]
        with running(harness) as stream:
            harness.commit(*events)
            take(stream, 3, harness.deadline_seconds)
            for change in snapshot(harness, harness.table):
                change.ack.confirm()
                change.ack.confirm()
        check_next(harness, events, "only snapshot rows were confirmed")

    @rule("change_capture", "independent", "callers-choice")
    @rule("wal_change_capture", "two-capabilities")
    def test_live_stream_and_snapshot_leave_no_gap(self, harness: CaptureHarness) -> None:
        harness.commit(upsert(harness.table, 1, "before"))
        with running(harness) as stream:
            harness.commit(upsert(harness.table, 2, "between"))
            rows = {key for _, _, key, _ in map(seen, snapshot(harness, harness.table))}
            harness.commit(upsert(harness.table, 3, "after"))
            changes = {key for _, _, key, _ in map(seen, take(stream, 2, harness.deadline_seconds))}
        assert rows == ({1, 2} if harness.takes_snapshots else set())
        assert changes == {2, 3}

    @rule("change_capture", "snapshot-acks")
    def test_snapshot_can_be_closed_early(self, harness: CaptureHarness) -> None:
        events = [upsert(harness.table, each, "x") for each in range(10)]
        harness.commit(*events)

        def read_some() -> None:
            with closing(harness.capture().snapshot([harness.table])) as rows:
                assert len(list(islice(rows, 3))) == (3 if harness.takes_snapshots else 0)

        check_released(harness, lambda: Background(read_some).result(harness.deadline_seconds, "three rows"))
        for _ in range(2):
            again = snapshot(harness, harness.table)
            check_same_set(again, events if harness.takes_snapshots else [], "a second snapshot has all rows")

    # --- lag ------------------------------------------------------------------------------------------------

    @rule("change_capture", "lag()", "lag-apart")
    @rule("wal_change_capture", "lag()", "lag-none")
    def test_lag_is_unknown_until_there_is_a_resume_point(self, harness: CaptureHarness) -> None:
        assert harness.capture().lag() is None
        harness.commit(upsert(harness.table, 1, "x"))
        list(harness.capture().snapshot([harness.table]))
        assert harness.capture().lag() is None, "a snapshot creates no resume point"
        with running(harness) as stream:
            lag = harness.capture().lag()
            assert (lag is not None and lag >= 0) if harness.measures_lag else lag is None
            harness.commit(upsert(harness.table, 2, "x"))
            take(stream, 1, harness.deadline_seconds)

    @rule("change_capture", "lag()", "lag-bytes", "lag-grows", "lag-apart")
    @rule("wal_change_capture", "lag")
    def test_lag_grows_with_unconfirmed_changes_and_shrinks_when_they_are_confirmed(
        self, harness: CaptureHarness
    ) -> None:
        with running(harness) as stream:
            before = lag_of(harness)
            harness.commit(*(upsert(harness.table, each, "x" * 1000) for each in range(200)))
            changes = take(stream, 200, harness.deadline_seconds)
            high = lag_of(harness)
            assert high > before or not harness.measures_lag
            for change in changes:
                change.ack.confirm()
            lag_falls(harness, stream, high)

    @rule("mistakes", "idle-slot")
    def test_resume_point_advances_with_unrelated_commits(self, harness: CaptureHarness) -> None:
        with running(harness) as stream:
            harness.commit(upsert(harness.table, 1, "x"))
            take(stream, 1, harness.deadline_seconds)[0].ack.confirm()
            harness.commit_elsewhere()
            lag_falls(harness, stream, lag_of(harness))


# --- helpers ------------------------------------------------------------------------------------------------


def upsert(table: TableName, key: int, note: str | None) -> Upsert:
    return Upsert(table, {"id": key}, {"id": key, "note": note})


def delete(table: TableName, key: int) -> Delete:
    return Delete(table, {"id": key})


def confirm_all(acks: Iterable[Ack]) -> None:
    for ack in acks:
        ack.confirm()


def place(change: Change) -> tuple[int, int] | None:
    commit = change.commit
    return None if commit is None or commit.ordinal is None else (commit.position.value, commit.ordinal)


@contextmanager
def running(harness: CaptureHarness) -> Iterator[ChangeStream]:
    stream = harness.capture().live()
    try:
        yield stream
    except BaseException:
        # Closing a generator fails while a reader is blocked in it. The first error is the one to report.
        with suppress(Exception):
            stream.close()
        raise
    stream.close()


def deliver_three(harness: CaptureHarness, confirm: Callable[[list[Change]], object]) -> list[Event]:
    """Deliver three transactions of one change each, call `confirm` with the changes, and close the
    stream.
    """
    events: list[Event] = [upsert(harness.table, each, f"note {each}") for each in range(3)]
    with running(harness) as stream:
        for event in events:
            harness.commit(event)
        confirm(take(stream, 3, harness.deadline_seconds))
    return events


def check_next(harness: CaptureHarness, expected: Sequence[Event], why: str) -> None:
    """Check that a new stream delivers exactly `expected` before a marker that is committed now."""
    mark = upsert(harness.other, 99, "mark")
    with running(harness) as stream:
        harness.commit(mark)
        check_same(take_until(stream, mark, harness.deadline_seconds), [*expected, mark], why)


def check_released(harness: CaptureHarness, action: Callable[[], None]) -> None:
    """Check that `action` leaves no open resources, and that the capture can be started again."""
    before = harness.open_resources()
    action()
    gc.collect()
    wait_for(
        lambda: harness.open_resources() == before,
        f"the resources of before, {before},",
        harness.open_resources,
        harness.deadline_seconds,
    )
    mark = upsert(harness.other, 99, "mark")
    with running(harness) as stream:
        harness.commit(mark)
        take_until(stream, mark, harness.deadline_seconds)


def snapshot(harness: CaptureHarness, *tables: TableName) -> list[Change]:
    changes = Background(lambda: list(harness.capture().snapshot(tables))).result(
        harness.deadline_seconds, "the end of a snapshot"
    )
    assert all(isinstance(change.event, Upsert) for change in changes), "a snapshot has only upserts"
    return changes


def lag_of(harness: CaptureHarness) -> int:
    lag = harness.capture().lag()
    if not harness.measures_lag:
        assert lag is None, "the capture reports a lag, but the harness has measures_lag = False"
        return 0
    assert lag is not None, "a capture with a resume point must report a lag"
    return lag


def lag_falls(harness: CaptureHarness, stream: ChangeStream, high: int) -> None:
    """Wait until the lag is below `high`, with a reader blocked on the next change, as in production."""
    waiting = Background(lambda: next(stream))
    if harness.measures_lag:
        wait_for(
            lambda: lag_of(harness) < high,
            f"a lag below {high}",
            lambda: lag_of(harness),
            harness.deadline_seconds,
        )
    harness.commit(upsert(harness.table, 99, "mark"))
    waiting.result(harness.deadline_seconds, "the mark")
