"""The rules of `ChangeCapture`, as tests that any implementation can run.

Write a `CaptureHarness` for the source, and in a pytest module a subclass that gives it as the fixture `harness`, fresh for each test:

```python
class TestMyCapture(ChangeCaptureConformance):
    @pytest.fixture
    def harness(self) -> MyHarness:
        return MyHarness()
```

For pytest to explain failed assertions, `pytest.register_assert_rewrite("penstock.testing.capture_conformance")` in a conftest.

A test reads only as many changes as must come, and tells that nothing else came by a mark that it commits itself; there are no pauses to
tune. `examples/list_capture.py` is an implementation in a hundred lines that passes.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import islice, pairwise

from penstock.contracts.capture import Ack, Change, ChangeCapture, ChangeStream, Delete, Event, Truncate, Upsert
from penstock.schema import TableName
from penstock.testing.rules import rule
from penstock.testing.streams import Background, check_same, check_same_set, seen, seen_event, take, take_until, wait_for


class CaptureHarness(ABC):
    """The source behind a capture, with two empty tables of the columns `id` (a number, the key) and `note` (a text or NULL)."""

    table = TableName("public", "conformance")
    other = TableName("public", "conformance_other")
    deadline_seconds = 30.0
    takes_snapshots = True
    measures_lag = True
    orders_changes = True
    """False if the changes of one transaction come in an order of the capture's own, as they do when it sees rows and not a log."""

    @abstractmethod
    def capture(self) -> ChangeCapture:
        """A capture of both tables, as a process that has just started would make it; all of them share one resume point."""

    @abstractmethod
    def commit(self, *events: Event) -> None:
        """Make these things happen in one transaction, and return when it has committed. An upsert may find its row there or not."""

    @abstractmethod
    def commit_elsewhere(self) -> None:
        """Commit something of a noticeable size that the capture does not deliver."""

    def open_resources(self) -> object:
        """What is open now: connections, threads, whatever can be counted. It must be the same after a stream as before."""
        return None


class ChangeCaptureConformance:
    """Every rule of the contract has a test here, and its name says which."""

    # --- what is delivered ----------------------------------------------------------------------------------------------

    @rule("change_capture", "live()", "pluggable")
    @rule("wal_change_capture", "live()", "live-streams")
    def test_everything_that_commits_after_live_returned_is_delivered_in_order(self, harness: CaptureHarness) -> None:
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
                    check_same(found, events, "every change once, in the order of the commits")
                else:
                    check_same_set(found, events, "every change of a transaction once, before the next")

    @rule("mistakes", "change-lsn")
    def test_order_is_told_by_commit_and_ordinal(self, harness: CaptureHarness) -> None:
        with running(harness) as stream:
            harness.commit(*(upsert(harness.table, each, "x") for each in range(3)))
            harness.commit(*(upsert(harness.other, each, "x") for each in range(3)))
            places = [place(change) for change in take(stream, 6, harness.deadline_seconds)]
        if None not in places:
            known = [each for each in places if each is not None]
            assert all(one < next_one for one, next_one in pairwise(known)), f"commit and ordinal do not go up: {known}"
            assert len({position for position, _ in known}) == 2, f"two transactions have two positions: {known}"

    @rule("mistakes", "truncate")
    def test_truncate_is_delivered_where_it_happened(self, harness: CaptureHarness) -> None:
        table = harness.table
        with running(harness) as stream:
            expected: list[Event] = [upsert(table, 1, "before"), Truncate(table), upsert(table, 2, "after")]
            for event in expected:
                harness.commit(event)
            check_same(take(stream, 3, harness.deadline_seconds), expected, "a truncate is a change like any other")

    @rule("mistakes", "odd-keys")
    def test_no_key_and_no_value_is_taken_for_nothing(self, harness: CaptureHarness) -> None:
        with running(harness) as stream:
            expected = [upsert(harness.table, key, note) for key, note in [(0, ""), (-1, None), (1, "NULL"), (-(2**31), "\N{SNOWMAN}\n")]]
            harness.commit(*expected)
            changes = take(stream, len(expected), harness.deadline_seconds)
            check_same(changes, expected, "zero, negative keys, empty texts and NULL are values")
            for event in (change.event for change in changes):
                assert isinstance(event, Upsert)
                assert not event.unchanged
                assert not event.exact

    # --- confirming -----------------------------------------------------------------------------------------------------

    @rule("change_capture", "acks")
    def test_unconfirmed_changes_come_again_after_every_restart(self, harness: CaptureHarness) -> None:
        expected = [upsert(harness.table, each, "x") for each in range(3)]
        with running(harness) as stream:
            for event in expected:
                harness.commit(event)
            first = [place(change) for change in take(stream, 3, harness.deadline_seconds)]
        for _ in range(2):
            with running(harness) as stream:
                changes = take(stream, 3, harness.deadline_seconds)
                check_same(changes, expected, "what nobody confirmed comes again")
                assert [place(change) for change in changes] == first, "a change that comes again is the same change"

    @rule("change_capture", "acks", "live-resumes")
    @rule("wal_change_capture", "slots-resume")
    def test_confirmed_changes_do_not_come_again(self, harness: CaptureHarness) -> None:
        deliver_three(harness, confirm=lambda changes: confirm_all(change.ack for change in changes))
        check_next(harness, [], "all of them were confirmed, and the stream was closed")

    @rule("change_capture", "acks", "live-resumes")
    @rule("wal_change_capture", "connects")
    def test_resume_point_moves_to_the_first_unconfirmed_change(self, harness: CaptureHarness) -> None:
        events = deliver_three(harness, confirm=lambda changes: changes[0].ack.confirm())
        check_next(harness, events[1:], "the first was confirmed, the others were not")

    def test_order_of_confirming_does_not_matter(self, harness: CaptureHarness) -> None:
        deliver_three(harness, confirm=lambda changes: [changes[at].ack.confirm() for at in (2, 0, 1)])
        check_next(harness, [], "all of them were confirmed in the end")

    @rule("change_capture", "acks")
    def test_hole_holds_the_resume_point_back(self, harness: CaptureHarness) -> None:
        events = deliver_three(harness, confirm=lambda changes: [changes[at].ack.confirm() for at in (1, 2)])
        check_next(harness, events, "the first was not confirmed, so it comes again, and with it what followed it")

    def test_confirming_twice_is_confirming_once(self, harness: CaptureHarness) -> None:
        events = deliver_three(harness, confirm=lambda changes: [changes[0].ack.confirm() for _ in range(3)])
        check_next(harness, events[1:], "one change was confirmed three times, the others never")

    def test_transaction_confirmed_in_part_comes_again_as_a_whole(self, harness: CaptureHarness) -> None:
        first, second = upsert(harness.table, 1, "x"), [upsert(harness.table, 2, "x"), upsert(harness.other, 2, "x")]
        with running(harness) as stream:
            harness.commit(first)
            harness.commit(*second)
            for change in take(stream, 3, harness.deadline_seconds)[:2]:
                change.ack.confirm()
        check_next(harness, second, "half of a transaction cannot be resumed from")

    def test_any_thread_may_confirm(self, harness: CaptureHarness) -> None:
        with running(harness) as stream:
            harness.commit(*(upsert(harness.table, each, "x") for each in range(200)))
            acks = [change.ack for change in take(stream, 200, harness.deadline_seconds)]
            parts = [Background(partial(confirm_all, acks[at % 4 :: 4])) for at in range(8)]
            for part in parts:
                part.result(harness.deadline_seconds, "confirming")
        check_next(harness, [], "all of them were confirmed, each by two threads")

    def test_changes_that_came_again_can_be_confirmed(self, harness: CaptureHarness) -> None:
        events = deliver_three(harness, confirm=lambda _: None)
        with running(harness) as stream:
            changes = take(stream, 3, harness.deadline_seconds)
            check_same(changes, events, "what nobody confirmed comes again")
            for change in changes[:2]:
                change.ack.confirm()
        check_next(harness, events[2:], "two were confirmed the second time")

    def test_confirming_after_the_end_does_no_harm(self, harness: CaptureHarness) -> None:
        with running(harness) as stream:
            harness.commit(upsert(harness.table, 1, "x"))
            changes = take(stream, 1, harness.deadline_seconds)
        changes[0].ack.confirm()
        mark = upsert(harness.table, 99, "mark")
        with running(harness) as stream:
            harness.commit(mark)
            found = [seen(change) for change in take_until(stream, mark, harness.deadline_seconds)]
        assert found in ([seen(changes[0]), (harness.table, "upsert", 99, "mark")], [(harness.table, "upsert", 99, "mark")])

    # --- resources ------------------------------------------------------------------------------------------------------

    def test_stream_is_an_iterator_that_can_be_closed_more_than_once(self, harness: CaptureHarness) -> None:
        stream = harness.capture().live()
        assert isinstance(stream, ChangeStream)
        assert iter(stream) is stream
        stream.close()
        stream.close()
        assert Background(lambda: next(stream, None)).result(harness.deadline_seconds, "the end of a closed stream") is None

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
            harness.capture().live().close()  # now the resume point is there
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

    # --- snapshots ------------------------------------------------------------------------------------------------------

    @rule("change_capture", "snapshot()", "snapshot-rows", "upserts", "no-marker")
    @rule("wal_change_capture", "snapshot()", "snapshot-sql", "snapshot-upserts")
    def test_snapshot_is_the_rows_of_now_as_upserts_and_then_it_ends(self, harness: CaptureHarness) -> None:
        rows = [upsert(harness.table, each, f"note {each}") for each in range(-2, 300)]
        others = [upsert(harness.other, 1, None)]
        harness.commit(*rows, *others, upsert(harness.table, 999, "gone"))
        harness.commit(delete(harness.table, 999))
        found = [seen(change) for change in snapshot(harness, harness.table, harness.other)]
        expected = [seen_event(event) for event in [*rows, *others]] if harness.takes_snapshots else []
        assert sorted(found, key=repr) == sorted(expected, key=repr)

    @rule("change_capture", "snapshot-rows")
    def test_snapshot_has_only_the_tables_that_were_asked_for(self, harness: CaptureHarness) -> None:
        harness.commit(upsert(harness.table, 1, "x"))
        assert snapshot(harness, harness.other) == []
        assert snapshot(harness) == []

    @rule("change_capture", "snapshot-acks")
    def test_acks_of_a_snapshot_move_nothing(self, harness: CaptureHarness) -> None:
        events = [upsert(harness.table, each, "x") for each in range(3)]
        with running(harness) as stream:
            harness.commit(*events)
            take(stream, 3, harness.deadline_seconds)
            for change in snapshot(harness, harness.table):
                change.ack.confirm()
                change.ack.confirm()
        check_next(harness, events, "only rows of a snapshot were confirmed")

    @rule("change_capture", "independent", "callers-choice")
    @rule("wal_change_capture", "two-capabilities")
    def test_nothing_falls_between_live_and_snapshot(self, harness: CaptureHarness) -> None:
        harness.commit(upsert(harness.table, 1, "before"))
        with running(harness) as stream:
            harness.commit(upsert(harness.table, 2, "between"))
            rows = {key for _, _, key, _ in map(seen, snapshot(harness, harness.table))}
            harness.commit(upsert(harness.table, 3, "after"))
            changes = {key for _, _, key, _ in map(seen, take(stream, 2, harness.deadline_seconds))}
        assert rows == ({1, 2} if harness.takes_snapshots else set())
        assert changes == {2, 3}

    @rule("change_capture", "snapshot-acks")
    def test_snapshot_can_be_left_early(self, harness: CaptureHarness) -> None:
        events = [upsert(harness.table, each, "x") for each in range(10)]
        harness.commit(*events)

        def read_some() -> None:
            with closing(harness.capture().snapshot([harness.table])) as rows:
                assert len(list(islice(rows, 3))) == (3 if harness.takes_snapshots else 0)

        check_released(harness, lambda: Background(read_some).result(harness.deadline_seconds, "three rows"))
        for _ in range(2):
            again = snapshot(harness, harness.table)
            check_same_set(again, events if harness.takes_snapshots else [], "taken again, it begins at its beginning")

    # --- lag ------------------------------------------------------------------------------------------------------------

    @rule("change_capture", "lag()", "lag-apart")
    @rule("wal_change_capture", "lag()", "lag-none")
    def test_lag_is_unknown_until_there_is_a_resume_point(self, harness: CaptureHarness) -> None:
        assert harness.capture().lag() is None
        harness.commit(upsert(harness.table, 1, "x"))
        list(harness.capture().snapshot([harness.table]))
        assert harness.capture().lag() is None, "a snapshot makes no resume point"
        with running(harness) as stream:
            lag = harness.capture().lag()
            assert (lag is not None and lag >= 0) if harness.measures_lag else lag is None
            harness.commit(upsert(harness.table, 2, "x"))
            take(stream, 1, harness.deadline_seconds)

    @rule("change_capture", "lag()", "lag-bytes", "lag-grows", "lag-apart")
    @rule("wal_change_capture", "lag")
    def test_lag_goes_up_with_what_is_unconfirmed_and_down_when_it_is_confirmed(self, harness: CaptureHarness) -> None:
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
    def test_resume_point_follows_a_source_in_which_nothing_concerns_us(self, harness: CaptureHarness) -> None:
        with running(harness) as stream:
            harness.commit(upsert(harness.table, 1, "x"))
            take(stream, 1, harness.deadline_seconds)[0].ack.confirm()
            harness.commit_elsewhere()
            lag_falls(harness, stream, lag_of(harness))


# --- what the tests are made of -----------------------------------------------------------------------------------------------


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
        # A reader may still be stuck in it, and then a generator cannot be closed; what went wrong first is what counts.
        with suppress(Exception):
            stream.close()
        raise
    stream.close()


def deliver_three(harness: CaptureHarness, confirm: Callable[[list[Change]], object]) -> list[Event]:
    """Three transactions of one change each, delivered and then confirmed as asked; and the end of that stream."""
    events: list[Event] = [upsert(harness.table, each, f"note {each}") for each in range(3)]
    with running(harness) as stream:
        for event in events:
            harness.commit(event)
        confirm(take(stream, 3, harness.deadline_seconds))
    return events


def check_next(harness: CaptureHarness, expected: Sequence[Event], why: str) -> None:
    """What a new stream delivers first is this and nothing else."""
    mark = upsert(harness.other, 99, "mark")
    with running(harness) as stream:
        harness.commit(mark)
        check_same(take_until(stream, mark, harness.deadline_seconds), [*expected, mark], why)


def check_released(harness: CaptureHarness, action: Callable[[], None]) -> None:
    """After `action` everything is as it was, and the capture can be started again."""
    before = harness.open_resources()
    action()
    gc.collect()
    wait_for(lambda: harness.open_resources() == before, f"as before, {before},", harness.open_resources, harness.deadline_seconds)
    mark = upsert(harness.other, 99, "mark")
    with running(harness) as stream:
        harness.commit(mark)
        take_until(stream, mark, harness.deadline_seconds)


def snapshot(harness: CaptureHarness, *tables: TableName) -> list[Change]:
    changes = Background(lambda: list(harness.capture().snapshot(tables))).result(harness.deadline_seconds, "the end of a snapshot")
    assert all(isinstance(change.event, Upsert) for change in changes), "a snapshot has upserts alone"
    return changes


def lag_of(harness: CaptureHarness) -> int:
    lag = harness.capture().lag()
    if not harness.measures_lag:
        assert lag is None, "lag is measured, but the harness says that it is not"
        return 0
    assert lag is not None, "there is a resume point, so there is a lag"
    return lag


def lag_falls(harness: CaptureHarness, stream: ChangeStream, high: int) -> None:
    """With the stream's reader waiting for a change, as it does in a real program."""
    waiting = Background(lambda: next(stream))
    if harness.measures_lag:
        wait_for(lambda: lag_of(harness) < high, f"a lag below {high}", lambda: lag_of(harness), harness.deadline_seconds)
    harness.commit(upsert(harness.table, 99, "mark"))
    waiting.result(harness.deadline_seconds, "the mark")
