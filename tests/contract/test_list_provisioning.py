"""The provisioning conformance suite needs no database: the example in `examples/` passes it."""

from __future__ import annotations

import pytest

from examples.list_provisioning import main
from penstock.testing.provisioning_conformance import CaptureProvisioningConformance
from tests.support.contract.list_harnesses import RegisterHarness


class TestListProvisioning(CaptureProvisioningConformance):
    @pytest.fixture
    def harness(self) -> RegisterHarness:
        return RegisterHarness()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out.endswith("satisfied: True\n")
