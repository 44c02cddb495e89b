"""The suites of records are tied to no database: the example in `examples/` passes them too."""

from __future__ import annotations

import pytest
from typing_extensions import override

from examples.list_records import ListIterator, ListRecordSource, ListSnapshotter, Log, main
from penstock.contracts.capture import Event
from penstock.contracts.records import CdcIterator, RecordSource, Snapshotter
from penstock.testing.record_harness import Config, RecordHarness
from penstock.testing.record_source_conformance import RecordSourceConformance
from penstock.testing.records_conformance import (
    CdcIteratorConformance,
    IteratorHarness,
    SnapshotterConformance,
    SnapshotterHarness,
)


class ListSnapshotterHarness(SnapshotterHarness):
    deadline_seconds = 5.0

    def __init__(self) -> None:
        self.log = Log()

    @override
    def commit(self, *events: Event) -> None:
        self.log.commit(*events)

    @override
    def snapshotter(self) -> Snapshotter:
        return ListSnapshotter(self.log, self.table)


class ListIteratorHarness(IteratorHarness):
    deadline_seconds = 5.0
    capacity = 5

    @override
    def iterator(self) -> CdcIterator:
        return ListIterator(self.capacity)


class ListRecordHarness(RecordHarness):
    deadline_seconds = 5.0

    def __init__(self) -> None:
        self.log = Log()

    @override
    def commit(self, *events: Event) -> None:
        self.log.commit(*events)

    @override
    def source(self) -> RecordSource:
        return ListRecordSource({"here": self.log})

    @override
    def config(self) -> Config:
        return {"url": "list:here", "table": str(self.table)}

    @override
    def config_without_table(self) -> Config:
        return {"url": "list:here"}

    @override
    def config_without_address(self) -> Config:
        return {"url": "somewhere", "table": str(self.table)}

    @override
    def config_of_nobody(self) -> Config:
        return {"url": "list:nowhere", "table": str(self.table)}


class TestListSnapshotter(SnapshotterConformance):
    @pytest.fixture
    def harness(self) -> ListSnapshotterHarness:
        return ListSnapshotterHarness()


class TestListIterator(CdcIteratorConformance):
    @pytest.fixture
    def harness(self) -> ListIteratorHarness:
        return ListIteratorHarness()


class TestListRecordSource(RecordSourceConformance):
    @pytest.fixture
    def harness(self) -> ListRecordHarness:
        return ListRecordHarness()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out == "snapshot {'id': 1} {'id': 1, 'note': 'hello'}\ndelete {'id': 1} None\n"
