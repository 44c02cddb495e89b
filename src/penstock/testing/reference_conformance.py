"""Conformance suite for `ReferenceTableSource`.

Write a `ReferenceHarness` for the source. In a pytest module, subclass the suite and return a new harness for
each test from the fixture `harness`:

```python
class TestMyReferenceTable(ReferenceTableConformance):
    @pytest.fixture
    def harness(self) -> MyHarness:
        return MyHarness()
```

For pytest to explain failed assertions, a conftest calls `pytest.register_assert_rewrite` with the names of
this module and of `penstock.testing.reference_conformance`.

The tests use a consumer, `Follower`, which applies snapshot and changes to its own table. That table is
compared with the source's. Every wait has a deadline. `examples/list_reference.py` is an implementation of a
hundred lines that passes the suite.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pyarrow as pa

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, ORDINAL, ChangeType
from penstock.contracts.capture import Event, Truncate
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import ReferenceTableSource, reference_schema
from penstock.errors import CheckpointError, ConnectorStateError, PenstockError
from penstock.schema import TableName
from penstock.testing.capture_conformance import delete, upsert
from penstock.testing.rules import rule
from penstock.testing.streams import Background, wait_for

Table = dict[int, str | None]
"""The rows of the suite's table: `id` → `note`."""


class ReferenceHarness(ABC):
    """The source behind a reference table: one empty table with the columns `id` (number, primary key) and
    `note` (text, nullable).
    """

    table = TableName("public", "conformance")
    deadline_seconds = 30.0
    many_rows = 25_000
    """A number of rows that does not fit into one batch."""
    breaks = False
    """Whether `broken` is implemented."""
    delivers_steps = True
    """Whether the source delivers every intermediate state, not only the latest one."""

    @abstractmethod
    def source(self) -> ReferenceTableSource:
        """Return a new source of the table, as after a process start."""

    @abstractmethod
    def commit(self, *events: Event) -> None:
        """Apply the events in one transaction and return after the commit. The row of an upsert may or may
        not exist.
        """

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Make the source unreadable during the block."""
        yield

    def foreign_checkpoint(self) -> SourceCheckpoint:
        """A checkpoint that no source of this kind can have returned."""
        return SourceCheckpoint({"nowhere": "at all"}, 1, {"table": "another.one"})

    def acknowledged(self) -> object:
        """The source's acknowledged position, as a comparable value. It changes only with `confirm`. The
        default is for sources without a log.
        """
        return None

    def open_resources(self) -> object:
        """The open resources, such as the number of connections, threads and files, as a comparable value. It
        must be equal before use and after `close`.
        """
        return None


class Follower:
    """A consumer that applies the snapshot and changes to `table`."""

    def __init__(
        self, harness: ReferenceHarness, source: ReferenceTableSource, table: Table | None = None
    ) -> None:
        self.source = source
        self.table: Table = dict(table or {})
        self.places: list[tuple[int, int]] = []
        self.kinds: list[str] = []
        self._deadline_seconds = harness.deadline_seconds

    def poll_snapshot(self) -> pa.RecordBatch | None:
        batch = Background(self.source.poll_snapshot).result(
            self._deadline_seconds, "a batch of the snapshot or None"
        )
        self._apply(batch)
        return batch

    def poll_changes(self) -> pa.RecordBatch | None:
        batch = Background(self.source.poll_changes).result(
            self._deadline_seconds, "a batch of changes or None"
        )
        self._apply(batch)
        return batch

    def finish_snapshot(self) -> Follower:
        while self.poll_snapshot() is not None:
            pass
        return self

    def poll_until(self, condition: Callable[[], bool], what: str) -> None:
        def met() -> bool:
            self.poll_changes()
            return condition()

        wait_for(met, what, lambda: dict(list(self.table.items())[:20]), self._deadline_seconds)

    def follow(self, expected: Table) -> None:
        """Poll until the table equals `expected` and there are no more changes."""
        self.poll_until(
            lambda: self.table == expected,
            f"a table of {len(expected)} rows: {dict(list(expected.items())[:20])}",
        )
        while self.poll_changes() is not None:
            pass
        assert self.table == expected, "later changes made the table differ"

    def _apply(self, batch: pa.RecordBatch | None) -> None:
        if batch is None:
            return
        assert batch.num_rows > 0, "a batch must have rows; return None instead of an empty one"
        assert batch.schema.names == reference_schema(self.source.schema()).names, (
            "the table's columns, then the change columns"
        )
        assert batch.schema.types == reference_schema(self.source.schema()).types
        for row in batch.to_pylist():
            self.places.append((row[COMMIT_VERSION], row[ORDINAL]))
            self.kinds.append(row[CHANGE_TYPE])
            match row[CHANGE_TYPE]:
                case ChangeType.TRUNCATE:
                    self.table.clear()
                case ChangeType.DELETE:
                    self.table.pop(row["id"], None)
                case _:
                    assert row["id"] is not None
                    self.table[row["id"]] = row["note"]


@contextmanager
def following(
    harness: ReferenceHarness, checkpoint: SourceCheckpoint | None = None, table: Table | None = None
) -> Iterator[Follower]:
    """A consumer of a new source, restored from the checkpoint if there is one. Closes the source after the
    block.
    """
    with harness.source() as source:
        if checkpoint is not None:
            source.restore(SourceCheckpoint.from_json(checkpoint.to_json()))
        yield Follower(harness, source, table)


def commit_many(harness: ReferenceHarness) -> Table:
    """Commit more rows than fit into one batch."""
    table: Table = {each: f"note {each}" for each in range(harness.many_rows)}
    harness.commit(*(upsert(harness.table, key, note) for key, note in table.items()))
    return table


def all_alike(harness: ReferenceHarness, note: str) -> Table:
    table: Table = {}
    table.update((key, note) for key in range(harness.many_rows))
    return table


def has_moved(follower: Follower, before: SourceCheckpoint) -> bool:
    return follower.source.checkpoint() != before


def check_refused(call: Callable[[], object], error: type[PenstockError]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"this call must be refused with {error.__name__}")


class ReferenceTableConformance:
    """One test per rule of the contract; the test's name states the rule."""

    # --- the snapshot ---------------------------------------------------------------------------------------

    @rule("reference_table_source", "poll_snapshot()", "until-none", "next-batch", "some-or-none")
    def test_snapshot_returns_every_row_once_and_then_none(self, harness: ReferenceHarness) -> None:
        expected = commit_many(harness)
        with following(harness) as follower:
            follower.finish_snapshot()
            assert follower.table == expected
            assert len(follower.places) == len(expected), "every row must be delivered once"
            assert set(follower.kinds) == {ChangeType.SNAPSHOT}
            for _ in range(3):
                assert follower.poll_snapshot() is None, "a complete snapshot must stay complete"

    @rule("reference_table_source", "is_snapshot_complete()", "complete")
    @rule("mistakes", "first-empty-poll")
    def test_none_is_returned_only_when_the_snapshot_is_complete(self, harness: ReferenceHarness) -> None:
        commit_many(harness)
        with following(harness) as follower:
            assert not follower.source.is_snapshot_complete(), "no row has been delivered yet"
            assert follower.poll_snapshot() is not None
            assert len(follower.table) < harness.many_rows, "the suite needs more than one batch"
            assert not follower.source.is_snapshot_complete(), "not all rows have been delivered"
            follower.finish_snapshot()
            assert len(follower.table) == harness.many_rows
            assert follower.source.is_snapshot_complete()

    @rule("reference_table_source", "some-or-none", "complete")
    def test_empty_table_is_complete_at_once(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            assert follower.poll_snapshot() is None
            assert follower.source.is_snapshot_complete()

    @rule("reference_table_source", "some-or-none", "complete")
    def test_complete_snapshot_stays_complete_after_later_changes(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            harness.commit(upsert(harness.table, 1, "later"))
            follower.follow({1: "later"})
            assert follower.source.is_snapshot_complete()
            assert follower.poll_snapshot() is None, "later rows must be changes"

    @rule("reference_table_source", "next-batch")
    def test_schema_is_known_before_the_first_poll(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            assert follower.source.key() == ("id",)
            assert follower.source.schema().names == ["id", "note"]
            assert follower.poll_snapshot() is None

    # --- the changes ----------------------------------------------------------------------------------------

    @rule("reference_table_source", "changes-or-none")
    def test_none_does_not_end_the_changes(self, harness: ReferenceHarness) -> None:
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
            harness.commit(delete(table, 2), upsert(table, 20, ""))  # as for a key change
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
    def test_snapshot_and_changes_leave_no_gap(self, harness: ReferenceHarness) -> None:
        expected = commit_many(harness)
        with following(harness) as follower:
            assert follower.poll_snapshot() is not None
            last = harness.many_rows - 1
            harness.commit(
                upsert(harness.table, 0, "changed"),
                delete(harness.table, last),
                upsert(harness.table, last + 1, "new"),
            )
            follower.finish_snapshot()
            del expected[last]
            follower.follow({**expected, 0: "changed", last + 1: "new"})

    @rule("reference_table_source", "until-none", "then-changes")
    def test_changes_before_the_end_of_the_snapshot_are_refused(self, harness: ReferenceHarness) -> None:
        commit_many(harness)
        with following(harness) as follower:
            check_refused(follower.source.poll_changes, ConnectorStateError)
            follower.poll_snapshot()
            check_refused(follower.source.poll_changes, ConnectorStateError)
            follower.finish_snapshot()
            assert len(follower.table) == harness.many_rows, "an early poll_changes must have no effect"

    @rule("reference_table_source", "next-changes")
    def test_changes_are_ordered_by_version_and_ordinal(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            for note in ("a", "b", "c"):
                harness.commit(*(upsert(harness.table, each, note) for each in range(3)))
                follower.follow(dict.fromkeys(range(3), note))
        assert all(one < next_one for one, next_one in pairwise(follower.places)), (
            "(version, ordinal) must increase"
        )
        assert len({version for version, _ in follower.places}) == 3, (
            "three transactions must have three versions"
        )

    @rule("reference_table_source", "checkpoint()", "position")
    def test_table_is_consistent_whenever_the_checkpoint_moves(self, harness: ReferenceHarness) -> None:
        states: list[Table] = [{}, all_alike(harness, "a"), all_alike(harness, "b")]
        with following(harness) as follower:
            follower.finish_snapshot()
            last = follower.source.checkpoint()
            for state in states[1:]:
                harness.commit(*(upsert(harness.table, key, note) for key, note in state.items()))
            while follower.table != states[-1]:
                follower.poll_until(partial(has_moved, follower, last), "a moved checkpoint")
                last = follower.source.checkpoint()
                assert follower.table in states, "the table must never hold part of a transaction"

    @rule("reference_table_source", "snapshot-errors", "changes-errors")
    def test_failure_to_read_is_an_error_and_not_an_end(self, harness: ReferenceHarness) -> None:
        expected = commit_many(harness)
        if not harness.breaks:
            return
        with following(harness) as follower, harness.broken():
            check_refused(follower.finish_snapshot, PenstockError)
            assert not follower.source.is_snapshot_complete(), "rows may be missing after the error"
        with following(harness) as follower:
            follower.finish_snapshot()
            checkpoint = follower.source.checkpoint()
            harness.commit(upsert(harness.table, 0, "later"))
            with harness.broken():
                check_refused(partial(follower.follow, {**expected, 0: "later"}), PenstockError)
        with following(harness, checkpoint, expected) as follower:
            follower.follow({**expected, 0: "later"})

    @rule("reference_table_source", "changes-errors")
    def test_transaction_interrupted_by_an_error_is_redelivered_from_its_beginning(
        self, harness: ReferenceHarness
    ) -> None:
        if not harness.breaks:
            return
        with following(harness) as follower:
            follower.finish_snapshot()
            before = follower.source.checkpoint()
            expected = commit_many(harness)
            follower.poll_until(lambda: bool(follower.places), "the first rows of the transaction")
            assert not has_moved(follower, before), "the suite needs more than one batch"
            with harness.broken():
                try:
                    follower.poll_until(partial(has_moved, follower, before), "an error")
                except PenstockError:
                    assert not has_moved(follower, before), "the transaction is not complete"
                    follower.table.clear()
                    follower.places.clear()
            follower.follow(expected)
            assert len(set(follower.places)) == len(follower.places), (
                "every change must be delivered once after the restart"
            )

    # --- checkpoint and restore -----------------------------------------------------------------------------

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
    def test_checkpoint_covers_delivered_changes(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            harness.commit(upsert(harness.table, 1, "x"))
            follower.follow({1: "x"})
            checkpoint = follower.source.checkpoint()
        with following(harness, checkpoint, follower.table) as follower:
            assert follower.poll_changes() is None, "the checkpoint covers this change"
            harness.commit(upsert(harness.table, 2, "y"))
            follower.follow({1: "x", 2: "y"})
            assert len(set(follower.places)) == len(follower.places)

    @rule("reference_table_source", "position", "resumes")
    def test_checkpoint_covers_only_delivered_changes(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            harness.commit(upsert(harness.table, 1, "not polled"))
            checkpoint = follower.source.checkpoint()
        with following(harness, checkpoint) as follower:
            follower.follow({1: "not polled"})

    @rule("reference_table_source", "restores", "resumes")
    def test_older_checkpoint_redelivers_all_later_changes(self, harness: ReferenceHarness) -> None:
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
                    assert follower.kinds.count(ChangeType.DELETE) == 1, (
                        "the older checkpoint must deliver all changes again"
                    )

    @rule("reference_table_source", "resumes")
    def test_confirming_keeps_later_changes(self, harness: ReferenceHarness) -> None:
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

    @rule("reference_table_source", "restore()", "position", "restores")
    @rule("mistakes", "ack-in-checkpoint")
    def test_only_confirm_acknowledges(self, harness: ReferenceHarness) -> None:
        with following(harness) as follower:
            follower.finish_snapshot()
            older = follower.source.checkpoint()
            follower.source.confirm(older)
            before = harness.acknowledged()
            harness.commit(upsert(harness.table, 1, "x"))
            follower.follow({1: "x"})
            newer = follower.source.checkpoint()
        assert harness.acknowledged() == before, "polling, checkpoint and close must not acknowledge"
        with following(harness, newer, {1: "x"}) as follower:
            assert harness.acknowledged() == before, "restore must not acknowledge"
            harness.commit(upsert(harness.table, 2, "y"))
            follower.follow({1: "x", 2: "y"})
            assert harness.acknowledged() == before, "polling after a restore must not acknowledge"
        with following(harness, older) as follower:
            follower.follow({1: "x", 2: "y"})
            follower.source.confirm(newer)
            assert before is None or harness.acknowledged() != before, "confirm must acknowledge"

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

    # --- closing --------------------------------------------------------------------------------------------

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
        wait_for(
            lambda: harness.open_resources() == before,
            f"the resources of before, {before},",
            harness.open_resources,
            harness.deadline_seconds,
        )

    @rule("reference_table_source", "releases")
    def test_source_that_is_dropped_without_close_releases_everything(
        self, harness: ReferenceHarness
    ) -> None:
        commit_many(harness)
        before = harness.open_resources()
        Follower(harness, harness.source()).poll_snapshot()
        gc.collect()
        Follower(harness, harness.source()).finish_snapshot().poll_changes()
        gc.collect()
        wait_for(
            lambda: harness.open_resources() == before,
            f"the resources of before, {before},",
            harness.open_resources,
            harness.deadline_seconds,
        )

    @rule("reference_table_source", "close()", "releases")
    def test_closed_source_refuses_polls(self, harness: ReferenceHarness) -> None:
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
