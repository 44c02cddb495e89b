"""The reference table conformance suite needs no database: the example in `examples/` passes it."""

from __future__ import annotations

import pytest

from examples.list_reference import main
from penstock.testing.reference_conformance import ReferenceTableConformance
from tests.support.contract.list_harnesses import LedgerHarness


class TestListReference(ReferenceTableConformance):
    @pytest.fixture
    def harness(self) -> LedgerHarness:
        return LedgerHarness()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert '"version":"2"' in capsys.readouterr().out.splitlines()[-1]
