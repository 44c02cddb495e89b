"""The capture conformance suite needs no database: the example in `examples/` passes it."""

from __future__ import annotations

import pytest

from examples.list_capture import main
from penstock.testing.capture_conformance import ChangeCaptureConformance
from tests.support.contract.list_harnesses import ListHarness


class TestListCapture(ChangeCaptureConformance):
    @pytest.fixture
    def harness(self) -> ListHarness:
        return ListHarness()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out.endswith("behind by 0\n")
