"""What the suite of `RecordSource` is told of a source, and how it reads from one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from penstock.contracts.capture import Delete, Event, Upsert
from penstock.contracts.records import Operation, Record, RecordPosition, RecordSource
from penstock.errors import RecordNotFoundError, Recovery, SnapshotInterruptedError
from penstock.testing.records_conformance import TableHarness
from penstock.testing.streams import wait_for

Config = Mapping[str, str]

MARK = 99
"""A key that no test uses for anything else."""


class RecordHarness(TableHarness):
    """A source of records of one table, and what it is told."""

    @abstractmethod
    def source(self) -> RecordSource:
        """One that is not open, as a process that has just started would make it; all of them share what is acknowledged."""

    @abstractmethod
    def config(self) -> Config:
        """With which the table can be read. A read should not wait for longer than a second or so."""

    @abstractmethod
    def config_without_table(self) -> Config: ...

    @abstractmethod
    def config_without_address(self) -> Config:
        """Whose address is not even one."""

    @abstractmethod
    def config_of_nobody(self) -> Config:
        """Whose address is one, but nobody answers there."""


def upsert(harness: RecordHarness, key: int, text: str | None) -> Event:
    return Upsert(harness.table, {"id": key}, {"id": key, "note": text})


def note(record: Record) -> object:
    return None if record.payload is None else record.payload["note"]


def seen(record: Record) -> tuple[Operation, object, object]:
    return record.operation, record.key.get("id"), note(record)


@contextmanager
def opened(harness: RecordHarness) -> Iterator[RecordSource]:
    """Whether its snapshot is complete does not matter here."""
    source = harness.source()
    source.open(harness.config())
    try:
        yield source
    finally:
        with suppress(SnapshotInterruptedError):
            source.teardown()


def read(harness: RecordHarness, source: RecordSource, position: RecordPosition | None) -> Record:
    """The next record, once it is there."""
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


def read_on(harness: RecordHarness, source: RecordSource, position: RecordPosition | None, count: int) -> list[Record]:
    records: list[Record] = []
    for _ in range(count):
        records.append(read(harness, source, records[-1].position if records else position))
    return records


def start(harness: RecordHarness, source: RecordSource) -> RecordPosition:
    """The position after the snapshot of a table with one row, which is then removed again: from here on there are changes alone."""
    harness.insert(MARK)
    row = read(harness, source, None)
    harness.commit(Delete(harness.table, {"id": MARK}))
    position = row.position
    # The source was open already, and may have more to say of that row than the snapshot.
    while True:
        record = read(harness, source, position)
        position = record.position
        if record.operation is Operation.DELETE:
            return position


def apply(harness: RecordHarness, source: RecordSource, first: list[Record]) -> dict[object, object]:
    """What a target holds that was given these records and all that follow, up to a mark that is committed now."""
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
    """What is raised is this, and not that the snapshot is incomplete."""
    with harness.source() as source:
        source.open(harness.config())
        read(harness, source, None)
        raise KeyError
