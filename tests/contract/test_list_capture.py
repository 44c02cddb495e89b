"""The suite is tied to no database: the example in `examples/` passes it too."""

from __future__ import annotations

import pytest
from typing_extensions import override

from examples.list_capture import Journal, ListCapture, main
from penstock.contracts.capture import ChangeCapture, Event
from penstock.schema import TableName
from penstock.testing.capture_conformance import CaptureHarness, ChangeCaptureConformance, upsert


class ListHarness(CaptureHarness):
    deadline_seconds = 5.0

    def __init__(self) -> None:
        self.journal = Journal()

    @override
    def capture(self) -> ChangeCapture:
        return ListCapture(self.journal, frozenset({self.table, self.other}))

    @override
    def commit(self, *events: Event) -> None:
        self.journal.commit(*events)

    @override
    def commit_elsewhere(self) -> None:
        self.journal.commit(upsert(TableName("public", "elsewhere"), 1, "x"))


class TestListCapture(ChangeCaptureConformance):
    @pytest.fixture
    def harness(self) -> ListHarness:
        return ListHarness()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out.endswith("behind by 0\n")
