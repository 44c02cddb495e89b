"""Conformance suites for `Snapshotter` and `CdcIterator`, and the harness of the record suites.

Write the harness of a suite. In a pytest module, subclass the suite and return a new harness for each test
from the fixture `harness`; `capture_conformance` shows such a module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from penstock.contracts.capture import Delete, Event, Upsert
from penstock.contracts.records import (
    OPERATION,
    TABLE,
    CdcIterator,
    Operation,
    Record,
    RecordPosition,
    RecordSource,
    Snapshotter,
)
from penstock.errors import NoRowsError, RecordNotFoundError, Recovery, SnapshotInterruptedError
from penstock.schema import TableName
from penstock.testing.rules import rule
from penstock.testing.streams import Background, wait_for

Failure = TypeVar("Failure", bound=Exception)

_MOMENT_SECONDS = 0.3
"""Time after which a call that does not block has certainly returned."""


class TableHarness(ABC):
    """A source with one empty table. Columns: `id` (number, primary key) and `note` (text, nullable)."""

    table = TableName("public", "conformance")
    deadline_seconds = 30.0

    @abstractmethod
    def commit(self, *events: Event) -> None:
        """Apply the events in one transaction and return after the commit. The row of an upsert may or may
        not exist.
        """

    def open_resources(self) -> object:
        """The open resources, such as the number of connections and threads, as a comparable value. It must
        be equal before use and after a teardown.
        """
        return None

    def insert(self, *keys: int) -> None:
        self.commit(*(Upsert(self.table, {"id": key}, {"id": key, "note": f"note {key}"}) for key in keys))


class SnapshotterHarness(TableHarness):
    @abstractmethod
    def snapshotter(self) -> Snapshotter:
        """Return a snapshotter of the table as of now."""


class SnapshotterConformance:
    """One test per rule of the contract; the test's name states the rule."""

    @rule(
        "record_source",
        "Snapshotter()",
        "Snapshotter.has_next()",
        "Snapshotter.next()",
        "initial",
        "loads",
        "another-row",
        "next-row",
    )
    def test_snapshot_has_the_rows_of_its_creation_time(self, harness: SnapshotterHarness) -> None:
        harness.insert(-1, 0, 1, 2)
        snapshotter = harness.snapshotter()
        harness.insert(3)
        harness.commit(Upsert(harness.table, {"id": 1}, {"id": 1, "note": "later"}))
        records = read_through(snapshotter)
        assert {record.key["id"]: (record.payload or {}).get("note") for record in records} == {
            key: f"note {key}" for key in (-1, 0, 1, 2)
        }
        assert {record.operation for record in records} == {Operation.SNAPSHOT}
        assert len({record.position for record in records}) == len(records), (
            "every record must have its own position"
        )
        snapshotter.teardown()

    @rule("record_source", "increments-position")
    def test_repeated_has_next_skips_no_row(self, harness: SnapshotterHarness) -> None:
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
    def test_empty_table_is_complete_after_the_first_has_next(self, harness: SnapshotterHarness) -> None:
        snapshotter = harness.snapshotter()
        assert not snapshotter.has_next()
        raises(NoRowsError, snapshotter.next)
        snapshotter.teardown()

    @rule(
        "record_source",
        "Snapshotter.teardown()",
        "interrupt",
        "in-progress",
        "teardown-incomplete",
        "teardown-cleans",
        "teardown-first",
    )
    def test_teardown_of_an_incomplete_snapshot_raises_after_closing_everything(
        self, harness: SnapshotterHarness
    ) -> None:
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
    def test_teardown_before_the_first_row_raises_too(self, harness: SnapshotterHarness) -> None:
        harness.insert(1)
        before = harness.open_resources()
        raises(SnapshotInterruptedError, harness.snapshotter().teardown)
        check_as_before(harness, before)

    @rule("record_source", "marks-complete")
    def test_has_next_completes_a_snapshot(self, harness: SnapshotterHarness) -> None:
        harness.insert(1)
        snapshotter = harness.snapshotter()
        assert snapshotter.has_next()
        snapshotter.next()
        raises(SnapshotInterruptedError, snapshotter.teardown)

    @rule("record_source", "Snapshotter.teardown()", "teardown-by-caller", "teardown-cleans")
    def test_teardown_of_a_complete_snapshot_raises_nothing(self, harness: SnapshotterHarness) -> None:
        harness.insert(1, 2)
        before = harness.open_resources()
        snapshotter = harness.snapshotter()
        read_through(snapshotter)
        assert not snapshotter.has_next(), "has_next must work until teardown"
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
    """Number of records that the iterator buffers before a push blocks."""

    @abstractmethod
    def iterator(self) -> CdcIterator:
        """Return an empty iterator."""


class CdcIteratorConformance:
    """One test per rule of the contract; the test's name states the rule."""

    @rule("record_source", "CdcIterator()", "CdcIterator.has_next()", "in-buffer", "new-iterator")
    def test_has_next_returns_whether_a_record_is_available_now(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        assert not iterator.has_next()
        iterator.push(a_record(1))
        assert iterator.has_next()
        assert iterator.has_next()
        iterator.next()
        assert not iterator.has_next()

    @rule(
        "record_source",
        "CdcIterator.next()",
        "CdcIterator.push()",
        "push-appends",
        "next-in-buffer",
        "one-record",
    )
    def test_records_are_returned_one_at_a_time_in_push_order(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        records = [a_record(number) for number in range(min(harness.capacity, 5))]
        for record in records:
            iterator.push(record)
        assert [iterator.next() for _ in records] == records
        iterator.push(records[0])
        assert list(iterator) == [records[0]], "iteration ends with the records that are available now"

    @rule("record_source", "next-blocks")
    def test_next_waits_for_a_push(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        waiting = Background(iterator.next)
        assert not waiting.is_over(_MOMENT_SECONDS), "next must block while there are no records"
        assert not iterator.has_next()
        iterator.push(a_record(7))
        assert waiting.result(harness.deadline_seconds, "the record that was pushed") == a_record(7)

    def test_slow_reader_blocks_the_pusher(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        total = harness.capacity * 4 + 10
        pushed: list[int] = []

        def push_all() -> None:
            for number in range(total):
                iterator.push(a_record(number))
                pushed.append(number)

        pushing = Background(push_all)
        wait_for(
            lambda: len(pushed) >= harness.capacity,
            "a full buffer",
            lambda: len(pushed),
            harness.deadline_seconds,
        )
        for number in range(total):
            # `number` records were read, and have left the buffer. It may have one record that `pushed` does
            # not have yet.
            assert len(pushed) - number <= harness.capacity, "the buffer is unbounded"
            record = Background(iterator.next).result(harness.deadline_seconds, "a record")
            assert record == a_record(number)
        pushing.result(harness.deadline_seconds, "the last push")

    @rule("record_source", "CdcIterator.teardown()", "teardown-noop", "no-rows")
    def test_teardown_ends_waiting_reads_without_an_error(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        waiting = [Background(iterator.next) for _ in range(2)]
        iterator.teardown()
        iterator.teardown()
        for each in waiting:
            raises(NoRowsError, partial(each.result, harness.deadline_seconds, "the end of a next"))
        raises(
            NoRowsError,
            lambda: Background(iterator.next).result(harness.deadline_seconds, "the end of a next"),
        )
        raises(NoRowsError, lambda: iterator.push(a_record(1)))
        assert not iterator.has_next()

    @rule("record_source", "CdcIterator.teardown()")
    def test_teardown_ends_a_push_into_a_full_buffer(self, harness: IteratorHarness) -> None:
        iterator = harness.iterator()
        for number in range(harness.capacity):
            iterator.push(a_record(number))
        pushing = Background(lambda: iterator.push(a_record(-1)))
        assert not pushing.is_over(_MOMENT_SECONDS), "a push into a full buffer must block"
        iterator.teardown()
        raises(NoRowsError, lambda: pushing.result(harness.deadline_seconds, "the end of a push"))


# --- helpers ------------------------------------------------------------------------------------------------


def a_record(number: int) -> Record:
    metadata = {OPERATION: Operation.UPSERT.value, TABLE: "public.t"}
    return Record(
        RecordPosition(str(number)), {"id": number}, {"id": number}, metadata, datetime.fromtimestamp(0, UTC)
    )


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
    """Check that `call` raises `kind`, and return the error. Does not need pytest, so that the suites import
    without it.
    """
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def check_as_before(harness: TableHarness, before: object) -> None:
    wait_for(
        lambda: harness.open_resources() == before,
        f"the resources of before, {before},",
        harness.open_resources,
        harness.deadline_seconds,
    )


Config = Mapping[str, str]

MARK = 99
"""A key reserved for marker rows."""


class RecordHarness(TableHarness):
    """A source of records of one table, and its configurations."""

    @abstractmethod
    def source(self) -> RecordSource:
        """Return a new source that is not open, as after a process start. All sources share the acknowledged
        position.
        """

    @abstractmethod
    def config(self) -> Config:
        """A valid configuration. A read should wait for at most about a second."""

    @abstractmethod
    def config_without_table(self) -> Config: ...

    @abstractmethod
    def config_without_address(self) -> Config:
        """A configuration with a malformed address."""

    @abstractmethod
    def config_of_nobody(self) -> Config:
        """A configuration with a valid address at which no server answers."""


def upsert(harness: RecordHarness, key: int, text: str | None) -> Event:
    return Upsert(harness.table, {"id": key}, {"id": key, "note": text})


def note(record: Record) -> object:
    return None if record.payload is None else record.payload["note"]


def seen(record: Record) -> tuple[Operation, object, object]:
    return record.operation, record.key.get("id"), note(record)


@contextmanager
def opened(harness: RecordHarness) -> Iterator[RecordSource]:
    """An open source. An incomplete snapshot at teardown is not an error here."""
    source = harness.source()
    source.open(harness.config())
    try:
        yield source
    finally:
        with suppress(SnapshotInterruptedError):
            source.teardown()


def read(harness: RecordHarness, source: RecordSource, position: RecordPosition | None) -> Record:
    """Return the next record, waiting for it."""
    found: list[Record] = []

    def has_come() -> bool:
        try:
            found.append(source.read(position))
        except RecordNotFoundError as error:
            if error.recovery is not Recovery.RETRY:
                raise
        return bool(found)

    wait_for(has_come, f"a record after {position}", lambda: "none yet", harness.deadline_seconds)
    return found[0]


def read_on(
    harness: RecordHarness, source: RecordSource, position: RecordPosition | None, count: int
) -> list[Record]:
    records: list[Record] = []
    for _ in range(count):
        records.append(read(harness, source, records[-1].position if records else position))
    return records


def start(harness: RecordHarness, source: RecordSource) -> RecordPosition:
    """Read the snapshot of a table with one row, delete that row, and return the position after the snapshot.
    Later records are changes.
    """
    harness.insert(MARK)
    row = read(harness, source, None)
    harness.commit(Delete(harness.table, {"id": MARK}))
    position = row.position
    # The source was open before the insert, so the changes of the row may follow the snapshot.
    while True:
        record = read(harness, source, position)
        position = record.position
        if record.operation is Operation.DELETE:
            return position


def apply(harness: RecordHarness, source: RecordSource, first: list[Record]) -> dict[object, object]:
    """The rows that a target has after these records and all later ones, up to a marker that is committed
    now.
    """
    harness.commit(upsert(harness, MARK, "mark"))
    records = list(first)
    while records[-1].key.get("id") != MARK:
        records.append(read(harness, source, records[-1].position))
    rows: dict[object, object] = {}
    for record in records:
        if record.operation is Operation.TRUNCATE:
            rows.clear()
        elif record.operation is Operation.DELETE:
            rows.pop(record.key["id"], None)
        else:
            rows[record.key["id"]] = note(record)
    return rows


def ack_all(source: RecordSource, records: list[Record]) -> None:
    for record in records:
        source.ack(record.position)


def fail_in_a_snapshot(harness: RecordHarness) -> None:
    """Raise KeyError within a snapshot. The source must pass it on, instead of the error about an incomplete
    snapshot.
    """
    with harness.source() as source:
        source.open(harness.config())
        read(harness, source, None)
        raise KeyError
