"""Records of an in-memory capture: however they are read, acknowledged and rewound, none is lost, repeated or
out of order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from penstock.contracts.capture import Change, Delete, Event, Upsert
from penstock.contracts.records import Record, RecordPosition, RecordSource
from penstock.errors import (
    ConfigError,
    ConnectionLostError,
    NoRowsError,
    RecordGoneError,
    RecordNotFoundError,
    Recovery,
    SnapshotInterruptedError,
    SnapshotLostError,
)
from penstock.position import Position
from penstock.records.builder import ChangePlace, RecordBuilder, parse_place
from penstock.records.reader import CaptureSnapshotter, RecordReading
from penstock.records.stream import AckLedger
from penstock.schema import TableName
from penstock.testing.record_source_conformance import RecordSourceConformance
from penstock.testing.records_conformance import opened, raises, read, read_on, read_through, start
from penstock.testing.streams import Background, wait_for
from tests.support.contract.memory_records import (
    ELSEWHERE,
    JournalStream,
    MemoryCapture,
    MemoryRecordHarness,
    MemoryRecordSource,
)


class TestMemoryRecordSource(RecordSourceConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> MemoryRecordHarness:
        return MemoryRecordHarness(tmp_path)


def test_resume_point_waits_for_acknowledgements_and_for_nothing_else(tmp_path: Path) -> None:
    harness = MemoryRecordHarness(tmp_path)
    journal = harness.journal
    with opened(harness) as source:
        position = start(harness, source)
        done = len(journal.transactions)
        harness.insert(1, 2)
        harness.commit(Upsert(ELSEWHERE, {"id": 1}, {"id": 1}))
        first, second = read_on(harness, source, position, 2)
        assert journal.resume is not None
        assert journal.resume < done, "nothing was acknowledged"
        source.ack(first.position)
        assert journal.resume == done, "half of a transaction"
        source.ack(second.position)

        def has_moved() -> bool:
            raises(RecordNotFoundError, lambda: source.read(second.position))
            return journal.resume == done + 2

        wait_for(
            has_moved, "everything done, other tables too", lambda: journal.resume, harness.deadline_seconds
        )


class BreaksOff(MemoryCapture):
    """A capture whose snapshot is lost after its second row."""

    @override
    def snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        yield from islice(super().snapshot(tables), 2)
        raise SnapshotLostError("gone")


def test_snapshot_that_breaks_off_never_seems_complete(tmp_path: Path) -> None:
    harness = MemoryRecordHarness(tmp_path)
    harness.insert(1, 2, 3)
    snapshotter = CaptureSnapshotter(
        BreaksOff(harness.journal, frozenset({harness.table})), RecordBuilder(harness.table)
    )
    for _ in range(2):
        raises(SnapshotLostError, lambda: read_through(snapshotter))
    raises(SnapshotInterruptedError, snapshotter.teardown)


def test_failed_snapshot_that_was_torn_down_has_no_rows(tmp_path: Path) -> None:
    harness = MemoryRecordHarness(tmp_path)
    harness.insert(1, 2, 3)
    snapshotter = CaptureSnapshotter(
        BreaksOff(harness.journal, frozenset({harness.table})), RecordBuilder(harness.table)
    )
    raises(SnapshotLostError, lambda: read_through(snapshotter))
    raises(SnapshotInterruptedError, snapshotter.teardown)
    assert not snapshotter.has_next()
    raises(NoRowsError, snapshotter.next)


class FailsOnce(MemoryCapture):
    """A capture whose first stream is cut off."""

    streams = 0

    @override
    def live(self) -> JournalStream:  # type: ignore[override]
        FailsOnce.streams += 1
        stream = super().live()
        return CutOff(self._journal, 0) if FailsOnce.streams == 1 else stream


class CutOff(JournalStream):
    @override
    def __next__(self) -> Change:
        raise ConnectionLostError("cut off")


def test_stream_that_was_cut_off_is_reopened_by_the_next_read(tmp_path: Path) -> None:
    harness = MemoryRecordHarness(tmp_path)
    reading = reading_of(harness, FailsOnce(harness.journal, frozenset({harness.table})), wait_seconds=60)
    harness.insert(1)
    raises(ConnectionLostError, lambda: reading.read(None))
    assert reading.read(None).key["id"] == 1
    reading.close()


def test_teardown_before_the_stream_opens_ends_the_read_too(tmp_path: Path) -> None:
    harness = MemoryRecordHarness(tmp_path)
    reading = reading_of(
        harness, MemoryCapture(harness.journal, frozenset({harness.table})), wait_seconds=600
    )
    reading.wake()
    raises(
        NoRowsError,
        lambda: Background(lambda: reading.read(None)).result(harness.deadline_seconds, "the end of a read"),
    )
    reading.close()


def reading_of(harness: MemoryRecordHarness, capture: MemoryCapture, *, wait_seconds: float) -> RecordReading:
    known = Position.of(len(harness.journal.transactions))
    ledger = AckLedger(harness.spool)
    return RecordReading(
        capture, RecordBuilder(harness.table), ledger, known, takes_snapshot=False, wait_seconds=wait_seconds
    )


def test_acknowledgement_of_another_process_is_not_overtaken(tmp_path: Path) -> None:
    harness = MemoryRecordHarness(tmp_path)
    with opened(harness) as early:
        position = start(harness, early)
        harness.insert(1)
        harness.insert(2)
        first, second = read_on(harness, early, position, 2)
        with opened(harness) as late:
            early.ack(second.position)
            early.teardown()
            raises(RecordGoneError, lambda: read(harness, late, first.position))
            harness.insert(3)
            assert read(harness, late, second.position).key["id"] == 3


def test_positions_beyond_the_end_belong_to_another_source(tmp_path: Path) -> None:
    harness = MemoryRecordHarness(tmp_path)
    with opened(harness) as source:
        start(harness, source)
        for text in ("FFFF/0:1", "FFFF/0"):
            raises(RecordGoneError, partial(source.read, RecordPosition(text)))
            raises(RecordGoneError, partial(source.ack, RecordPosition(text)))


class Unplaced(MemoryCapture):
    """Records lack the commit of their change."""

    @override
    def snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        yield from (replace(change, commit=None) for change in super().snapshot(tables))


def test_capture_that_does_not_place_its_changes_cannot_be_read_from(tmp_path: Path) -> None:
    harness = MemoryRecordHarness(tmp_path)
    harness.insert(1)
    with pytest.raises(ConfigError, match="position"):
        CaptureSnapshotter(
            Unplaced(harness.journal, frozenset({harness.table})), RecordBuilder(harness.table)
        )


class Reader:
    """A program that stores its position, and sometimes dies or rewinds."""

    def __init__(self, harness: MemoryRecordHarness) -> None:
        self.harness = harness
        self.source: RecordSource = harness.source()
        self.source.open(harness.config())
        self.places: list[RecordPosition] = [start(harness, self.source)]
        """All changes read, in order; index 0 is the start."""
        self.records: list[Record] = []
        self.keys: list[object] = []
        """The positions of all committed changes, in order."""
        self.at = self.acked = 0

    def commit(self, size: int) -> None:
        events: list[Event] = []
        for _ in range(size):
            key = len(self.keys)
            self.keys.append(key)
            events.append(
                Upsert(self.harness.table, {"id": key}, {"id": key, "note": "x"})
                if key % 3
                else self._delete(key)
            )
        self.harness.commit(*events)

    def _delete(self, key: int) -> Event:
        return Delete(self.harness.table, {"id": key})

    def read(self) -> None:
        if self.at == len(self.keys):
            error = raises(RecordNotFoundError, lambda: self.source.read(self.places[self.at]))
            assert error.recovery is Recovery.RETRY
            return
        record = read(self.harness, self.source, self.places[self.at])
        assert record.key["id"] == self.keys[self.at]
        if self.at == len(self.records):
            self.records.append(record)
            self.places.append(record.position)
        assert record.position == self.records[self.at].position, (
            "a record that is read again has its old position"
        )
        self.at += 1

    def ack(self, at: int) -> None:
        self.source.ack(self.places[at])
        self.acked = max(self.acked, at)
        self.at = max(self.at, self.acked)

    def restart(self) -> None:
        self.source.teardown()
        self.source = self.harness.source()
        self.source.open(self.harness.config())

    def crash(self) -> None:
        """A crash may lose the last acknowledgements, and nothing else."""
        assert isinstance(self.source, MemoryRecordSource)
        self.source.die()
        noted = AckLedger(self.harness.spool).acked
        self.acked = max(
            at for at, place in enumerate(self.places) if at == 0 or self._is_noted(place, noted)
        )
        self.source = self.harness.source()
        self.source.open(self.harness.config())

    def _is_noted(self, position: RecordPosition, noted: ChangePlace) -> bool:
        place = parse_place(position)
        return isinstance(place, ChangePlace) and place <= noted

    def ask_for_what_is_gone(self, at: int) -> None:
        error = raises(RecordGoneError, lambda: self.source.read(self.places[at]))
        assert error.recovery is not Recovery.RETRY


@settings(max_examples=40)
@given(data=st.data())
def test_records_are_in_order_and_complete_whatever_the_reader_does(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    reader = Reader(MemoryRecordHarness(tmp_path_factory.mktemp("spool")))
    try:
        for _ in range(data.draw(st.integers(1, 25), label="steps")):
            take_a_step(reader, data)
        while reader.at < len(reader.keys):
            reader.read()
        assert reader.at == len(reader.keys)
    finally:  # also if hypothesis discards an example
        reader.source.teardown()


def take_a_step(reader: Reader, data: st.DataObject) -> None:
    match data.draw(
        st.sampled_from(["commit", "read", "read", "read", "ack", "back", "restart", "crash", "gone"]),
        label="step",
    ):
        case "commit":
            reader.commit(data.draw(st.integers(1, 4), label="changes"))
        case "read":
            reader.read()
        case "ack":
            reader.ack(data.draw(st.integers(0, len(reader.places) - 1), label="up to"))
        case "back":
            reader.at = data.draw(st.integers(reader.acked, len(reader.places) - 1), label="to")
        case "restart":
            reader.restart()
        case "crash":
            reader.crash()
        case _ if reader.acked:
            reader.ask_for_what_is_gone(data.draw(st.integers(0, reader.acked - 1), label="at"))
