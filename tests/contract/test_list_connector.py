"""The connector conformance suite needs no database: the example in `examples/` passes it."""

from __future__ import annotations

import pytest

from examples.list_connector import main
from penstock.testing.connector_conformance import SourceConnectorConformance
from tests.support.contract.list_harnesses import ListConnectorHarness


class TestListConnector(SourceConnectorConformance):
    @pytest.fixture
    def harness(self) -> ListConnectorHarness:
        return ListConnectorHarness()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out.endswith("may be forgotten: 2\n")
