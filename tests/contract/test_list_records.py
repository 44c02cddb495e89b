"""The record conformance suites need no database: the examples in `examples/` pass them."""

from __future__ import annotations

import pytest

from examples.list_records import main
from penstock.testing.record_source_conformance import RecordSourceConformance
from penstock.testing.records_conformance import (
    CdcIteratorConformance,
    SnapshotterConformance,
)
from tests.support.contract.list_harnesses import (
    ListIteratorHarness,
    ListRecordHarness,
    ListSnapshotterHarness,
)


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
