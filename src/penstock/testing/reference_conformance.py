"""The rules of `ReferenceTableSource`, as tests that any implementation can run.

Write a `ReferenceHarness` for the source, and in a pytest module a subclass that gives it as the fixture `harness`, fresh for each test:

```python
class TestMyReferenceTable(ReferenceTableConformance):
    @pytest.fixture
    def harness(self) -> MyHarness:
        return MyHarness()
```

For pytest to explain failed assertions, a conftest calls `pytest.register_assert_rewrite` with the names of this module and of
`penstock.testing.reference_harness`.

A test plays a consumer: `Follower` applies what it is given to a table of its own, and that is compared with what the source holds. Every
wait has a deadline. `examples/list_reference.py` is an implementation in a hundred lines that passes.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from penstock.change import ChangeType
from penstock.contracts.capture import Truncate
from penstock.contracts.connector import SourceCheckpoint
from penstock.errors import CheckpointError, ConnectorStateError, PenstockError
from penstock.testing.capture_conformance import delete, upsert
from penstock.testing.reference_harness import (
    Follower,
    ReferenceHarness,
    Table,
    all_alike,
    check_refused,
    commit_many,
    following,
    has_moved,
)
from penstock.testing.rules import rule
from penstock.testing.streams import wait_for


class ReferenceTableConformance:
    """Every rule of the contract has a test here, and its name says which."""

    # --- the snapshot -----------------------------------------------------------------------------------------------------

    @rule("reference_table_source", "poll_snapshot()", "until-none", "next-batch", "some-or-none")
    def test_snapshot_is_every_row_once_and_then_none_for_good(self, harness: ReferenceHarness) -> None:
        expected = commit_many(harness)
        with following(harness) as follower:
            follower.finish_snapshot()
            assert follower.table == expected
            assert len(follower.places) == len(expected), "each row comes once"
            assert set(follower.kinds) == {ChangeType.SNAPSHOT}
            for _ in range(3):
                assert follower.poll_snapshot() is None, "complete is complete, for good"

    @rule("reference_table_source", "is_snapshot_complete()", "complete")
    @rule("mistakes", "first-empty-poll")
    def test_none_comes_only_when_the_snapshot_is_complete(self, harness: ReferenceHarness) -> None:
        commit_many(harness)
        with following(harness) as follower:
            assert not follower.source.is_snapshot_complete(), "nothing has been delivered yet"
            assert follower.poll_snapshot() is not None
            assert len(follower.table) < harness.many_rows, "the suite wants to see more than one batch"
            assert not follower.source.is_snapshot_complete(), "there is more to come"
            follower.finish_snapshot()
            assert len(follower.table) == harness.many_rows
            assert follower.source.is_snapshot_complete()

    @rule("reference_table_source", "some-or-none", "complete")
    def test_empty_table_is_complete_at_once(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            assert follower.poll_snapshot() is None
            assert follower.source.is_snapshot_complete()

    @rule("reference_table_source", "some-or-none", "complete")
    def test_snapshot_stays_complete_whatever_comes_after_it(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            harness.commit(upsert(harness.table, 1, "later"))
            follower.follow({1: "later"})
            assert follower.source.is_snapshot_complete()
            assert follower.poll_snapshot() is None, "what comes later is a change"

    @rule("reference_table_source", "next-batch")
    def test_shape_is_known_before_the_first_poll(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            assert follower.source.key() == ("id",)
            assert follower.source.schema().names == ["id", "note"]
            assert follower.poll_snapshot() is None

    # --- the changes ------------------------------------------------------------------------------------------------------

    @rule("reference_table_source", "changes-or-none")
    def test_none_means_nothing_now_and_not_never(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            for note in ("one", "two", "three"):
                assert follower.poll_changes() is None
                assert follower.poll_changes() is None
                harness.commit(upsert(harness.table, 1, note))
                follower.follow({1: note})

    @rule("reference_table_source", "poll_changes()", "then-changes", "next-changes")
    def test_changes_keep_the_table_current(self, harness: ReferenceHarness) -> None:
        table = harness.table
        harness.commit(*(upsert(table, each, "old") for each in range(-2, 5)))
        with following(harness) as follower:
            follower.finish_snapshot()
            harness.commit(upsert(table, 0, "new"), upsert(table, 10, None), delete(table, 1))
            harness.commit(delete(table, 2), upsert(table, 20, ""))  # a key change is these two
            harness.commit(delete(table, 10))
            harness.commit(upsert(table, 10, "again"))
            follower.follow({-2: "old", -1: "old", 0: "new", 3: "old", 4: "old", 10: "again", 20: ""})

    @rule("reference_table_source", "next-changes")
    def test_truncate_takes_every_row(self, harness: ReferenceHarness) -> None:
        harness.commit(*(upsert(harness.table, each, "x") for each in range(5)))
        with following(harness) as follower:
            follower.finish_snapshot()
            harness.commit(Truncate(harness.table))
            follower.follow({})
            harness.commit(upsert(harness.table, 1, "after"))
            follower.follow({1: "after"})

    @rule("reference_table_source", "then-changes")
    @rule("reference_table_source", "populates")
    def test_nothing_falls_between_snapshot_and_changes(self, harness: ReferenceHarness) -> None:
        expected = commit_many(harness)
        with following(harness) as follower:
            assert follower.poll_snapshot() is not None
            last = harness.many_rows - 1
            harness.commit(upsert(harness.table, 0, "meanwhile"), delete(harness.table, last), upsert(harness.table, last + 1, "new"))
            follower.finish_snapshot()
            del expected[last]
            follower.follow({**expected, 0: "meanwhile", last + 1: "new"})

    @rule("reference_table_source", "until-none", "then-changes")
    def test_changes_before_the_end_of_the_snapshot_are_refused(self, harness: ReferenceHarness) -> None:
        commit_many(harness)
        with following(harness) as follower:
            check_refused(follower.source.poll_changes, ConnectorStateError)
            follower.poll_snapshot()
            check_refused(follower.source.poll_changes, ConnectorStateError)
            follower.finish_snapshot()
            assert len(follower.table) == harness.many_rows, "a call out of turn does no harm"

    @rule("reference_table_source", "next-changes")
    def test_order_is_told_by_version_and_ordinal(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            for note in ("a", "b", "c"):
                harness.commit(*(upsert(harness.table, each, note) for each in range(3)))
                follower.follow(dict.fromkeys(range(3), note))
        assert all(one < next_one for one, next_one in pairwise(follower.places)), "version and ordinal go up"
        assert len({version for version, _ in follower.places}) == 3, "three transactions have three versions"

    @rule("reference_table_source", "checkpoint()", "position")
    def test_table_is_whole_whenever_the_checkpoint_moves(self, harness: ReferenceHarness) -> None:
        states: list[Table] = [{}, all_alike(harness, "a"), all_alike(harness, "b")]
        with following(harness) as follower:
            follower.finish_snapshot()
            last = follower.source.checkpoint()
            for state in states[1:]:
                harness.commit(*(upsert(harness.table, key, note) for key, note in state.items()))
            while follower.table != states[-1]:
                follower.poll_until(partial(has_moved, follower, last), "a moved checkpoint")
                last = follower.source.checkpoint()
                assert follower.table in states, "half a transaction is no state of the source"

    @rule("reference_table_source", "snapshot-errors", "changes-errors")
    def test_failure_to_read_is_an_error_and_not_an_end(self, harness: ReferenceHarness) -> None:
        expected = commit_many(harness)
        if not harness.breaks:
            return
        with following(harness) as follower, harness.broken():
            check_refused(follower.finish_snapshot, PenstockError)
            assert not follower.source.is_snapshot_complete(), "nobody knows what is missing"
        with following(harness) as follower:
            follower.finish_snapshot()
            checkpoint = follower.source.checkpoint()
            harness.commit(upsert(harness.table, 0, "later"))
            with harness.broken():
                check_refused(partial(follower.follow, {**expected, 0: "later"}), PenstockError)
        with following(harness, checkpoint, expected) as follower:
            follower.follow({**expected, 0: "later"})

    @rule("reference_table_source", "changes-errors")
    def test_transaction_that_an_error_breaks_off_comes_again_from_its_beginning(self, harness: ReferenceHarness) -> None:
        if not harness.breaks:
            return
        with following(harness) as follower:
            follower.finish_snapshot()
            before = follower.source.checkpoint()
            expected = commit_many(harness)
            follower.poll_until(lambda: bool(follower.places), "the first rows of the transaction")
            assert not has_moved(follower, before), "the suite wants to see more than one batch"
            with harness.broken():
                try:
                    follower.poll_until(partial(has_moved, follower, before), "an error")
                except PenstockError:
                    assert not has_moved(follower, before), "nobody has the transaction whole"
                    follower.table.clear()
                    follower.places.clear()
            follower.follow(expected)
            assert len(set(follower.places)) == len(follower.places), "each change once, since the beginning"

    # --- checkpoint and restore ---------------------------------------------------------------------------------------------

    @rule("reference_table_source", "checkpoint()", "position")
    def test_checkpoint_has_no_effect_and_is_plain(self, harness: ReferenceHarness) -> None:
        harness.commit(upsert(harness.table, 1, "x"))
        with following(harness) as follower:
            assert follower.source.checkpoint() == follower.source.checkpoint()
            follower.finish_snapshot()
            taken = [follower.source.checkpoint() for _ in range(3)]
            assert taken[0] == taken[1] == taken[2]
            assert SourceCheckpoint.from_json(taken[0].to_json()) == taken[0]
            harness.commit(upsert(harness.table, 2, "y"))
            follower.follow({1: "x", 2: "y"})

    @rule("reference_table_source", "position", "restores")
    def test_checkpoint_before_anything_is_the_beginning(self, harness: ReferenceHarness) -> None:
        harness.commit(upsert(harness.table, 1, "x"))
        with following(harness) as follower:
            checkpoint = follower.source.checkpoint()
        with following(harness, checkpoint) as follower:
            assert not follower.source.is_snapshot_complete()
            assert follower.finish_snapshot().table == {1: "x"}

    @rule("reference_table_source", "position", "resumes")
    def test_checkpoint_within_a_snapshot_covers_no_part_of_it(self, harness: ReferenceHarness) -> None:
        expected = commit_many(harness)
        with following(harness) as follower:
            follower.poll_snapshot()
            checkpoint = follower.source.checkpoint()
        with following(harness, checkpoint) as follower:
            assert not follower.source.is_snapshot_complete()
            assert follower.finish_snapshot().table == expected

    @rule("reference_table_source", "restore()", "restores", "resumes")
    def test_restore_skips_a_finished_snapshot(self, harness: ReferenceHarness) -> None:
        harness.commit(upsert(harness.table, 1, "x"))
        with following(harness) as follower:
            follower.finish_snapshot()
            checkpoint = follower.source.checkpoint()
        harness.commit(upsert(harness.table, 2, "y"), delete(harness.table, 1))
        with following(harness, checkpoint, follower.table) as follower:
            assert follower.source.is_snapshot_complete()
            assert follower.poll_snapshot() is None
            follower.follow({2: "y"})

    @rule("reference_table_source", "checkpoint()", "position")
    def test_checkpoint_covers_what_was_delivered(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            harness.commit(upsert(harness.table, 1, "x"))
            follower.follow({1: "x"})
            checkpoint = follower.source.checkpoint()
        with following(harness, checkpoint, follower.table) as follower:
            assert follower.poll_changes() is None, "it was delivered before"
            harness.commit(upsert(harness.table, 2, "y"))
            follower.follow({1: "x", 2: "y"})
            assert len(set(follower.places)) == len(follower.places)

    @rule("reference_table_source", "position", "resumes")
    def test_checkpoint_covers_only_what_was_delivered(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            harness.commit(upsert(harness.table, 1, "not polled"))
            checkpoint = follower.source.checkpoint()
        with following(harness, checkpoint) as follower:
            follower.follow({1: "not polled"})

    @rule("reference_table_source", "restores", "resumes")
    def test_older_checkpoint_brings_everything_after_it_again(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            checkpoint = follower.source.checkpoint()
            harness.commit(upsert(harness.table, 1, "x"))
            follower.follow({1: "x"})
            harness.commit(upsert(harness.table, 2, "y"), delete(harness.table, 1))
            follower.follow({2: "y"})
        for _ in range(2):
            with following(harness, checkpoint) as follower:
                follower.follow({2: "y"})
                if harness.delivers_steps:
                    assert follower.kinds.count(ChangeType.DELETE) == 1, "all that happened happens again"

    @rule("reference_table_source", "resumes")
    def test_confirming_keeps_what_comes_after(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            harness.commit(upsert(harness.table, 1, "x"))
            follower.follow({1: "x"})
            checkpoint = follower.source.checkpoint()
            for _ in range(2):
                follower.source.confirm(checkpoint)
            harness.commit(upsert(harness.table, 2, "y"))
            follower.follow({1: "x", 2: "y"})
        with following(harness, checkpoint, {1: "x"}) as follower:
            follower.follow({1: "x", 2: "y"})

    @rule("reference_table_source", "restore-errors")
    def test_restore_after_the_first_poll_is_refused(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            checkpoint = follower.source.checkpoint()
            follower.finish_snapshot()
            check_refused(partial(follower.source.restore, checkpoint), ConnectorStateError)

    @rule("reference_table_source", "restore-errors")
    def test_checkpoint_of_another_source_is_refused(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            check_refused(partial(follower.source.restore, harness.foreign_checkpoint()), CheckpointError)

    # --- closing ------------------------------------------------------------------------------------------------------------

    @rule("reference_table_source", "close()", "then-close", "releases", "close-errors")
    def test_close_may_come_at_any_time_and_more_than_once(self, harness: ReferenceHarness) -> None:
        commit_many(harness)
        before = harness.open_resources()
        unused, begun, done = harness.source(), harness.source(), harness.source()
        unused.close()
        Follower(harness, begun).poll_snapshot()
        begun.close()
        Follower(harness, done).finish_snapshot().poll_changes()
        done.close()
        for source in (unused, begun, done):
            source.close()
        wait_for(lambda: harness.open_resources() == before, f"as before, {before},", harness.open_resources, harness.deadline_seconds)

    @rule("reference_table_source", "close()", "releases")
    def test_closed_source_gives_nothing_out(self, harness: ReferenceHarness) -> None:
        harness.commit(upsert(harness.table, 1, "x"))
        source = harness.source()
        Follower(harness, source).finish_snapshot()
        source.close()
        for poll in (source.poll_snapshot, source.poll_changes):
            check_refused(poll, ConnectorStateError)

    @rule("reference_table_source", "then-close", "releases")
    def test_with_block_closes(self, harness: ReferenceHarness) -> None:
        with harness.source() as source:
            Follower(harness, source).finish_snapshot()
        check_refused(source.poll_changes, ConnectorStateError)
