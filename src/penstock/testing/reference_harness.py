"""What the suite of reference tables is made of: the source behind a table, and a consumer that follows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, ORDINAL, ChangeType
from penstock.contracts.capture import Event
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import ReferenceTableSource, reference_schema
from penstock.errors import PenstockError
from penstock.schema import TableName
from penstock.testing.capture_conformance import upsert
from penstock.testing.streams import Background, wait_for

Table = dict[int, str | None]
"""The rows of the suite's table: `id` → `note`."""


class ReferenceHarness(ABC):
    """The source behind a reference table: one empty table of the columns `id` (a number, the key) and `note` (a text or NULL)."""

    table = TableName("public", "conformance")
    deadline_seconds = 30.0
    many_rows = 25_000
    """So many that they do not fit into one batch."""
    breaks = False
    """Whether `broken` is implemented."""
    delivers_steps = True
    """Whether every state that the source has had is delivered; not so where only its last one can be seen."""

    @abstractmethod
    def source(self) -> ReferenceTableSource:
        """Of that table, as a process that has just started would make it."""

    @abstractmethod
    def commit(self, *events: Event) -> None:
        """Make these things happen in one transaction, and return when it has committed. An upsert may find its row there or not."""

    @contextmanager
    def broken(self) -> Iterator[None]:
        """While in this block, the source cannot be read."""
        yield

    def foreign_checkpoint(self) -> SourceCheckpoint:
        """One that no table of this kind has ever given out."""
        return SourceCheckpoint({"nowhere": "at all"}, 1, {"table": "another.one"})

    def open_resources(self) -> object:
        """What is open now: connections, threads, files, whatever can be counted. It must be the same after a source as before."""
        return None


class Follower:
    """A consumer: what it has been given, applied."""

    def __init__(self, harness: ReferenceHarness, source: ReferenceTableSource, table: Table | None = None) -> None:
        self.source = source
        self.table: Table = dict(table or {})
        self.places: list[tuple[int, int]] = []
        self.kinds: list[str] = []
        self._deadline_seconds = harness.deadline_seconds

    def poll_snapshot(self) -> pa.RecordBatch | None:
        batch = Background(self.source.poll_snapshot).result(self._deadline_seconds, "a batch of the snapshot")
        self._apply(batch)
        return batch

    def poll_changes(self) -> pa.RecordBatch | None:
        batch = Background(self.source.poll_changes).result(self._deadline_seconds, "the answer whether there are changes")
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
        """Until the table is the expected one, and nothing more is there just now."""
        self.poll_until(lambda: self.table == expected, f"a table of {len(expected)} rows: {dict(list(expected.items())[:20])}")
        while self.poll_changes() is not None:
            pass
        assert self.table == expected, "it was right for a moment, and is not any more"

    def _apply(self, batch: pa.RecordBatch | None) -> None:
        if batch is None:
            return
        assert batch.num_rows > 0, "a batch has rows; None says that there are none"
        assert batch.schema.names == reference_schema(self.source.schema()).names, "the table's columns, then those of a change"
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
def following(harness: ReferenceHarness, checkpoint: SourceCheckpoint | None = None, table: Table | None = None) -> Iterator[Follower]:
    """A consumer of a new source, restored if there is a checkpoint; and the end of both."""
    with harness.source() as source:
        if checkpoint is not None:
            source.restore(SourceCheckpoint.from_json(checkpoint.to_json()))
        yield Follower(harness, source, table)


def commit_many(harness: ReferenceHarness) -> Table:
    """More rows than one batch has."""
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
    raise AssertionError(f"this call is refused with {error.__name__}")
