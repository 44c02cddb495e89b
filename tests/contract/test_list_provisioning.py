"""The suite is tied to no database: the example in `examples/` passes it too."""

from __future__ import annotations

import pytest
from typing_extensions import override

from examples.list_provisioning import ListProvisioning, Register, main
from penstock.contracts.provisioning import CaptureProvisioning
from penstock.schema import TableName
from penstock.testing.provisioning_conformance import CaptureProvisioningConformance, ProvisioningHarness


class RegisterHarness(ProvisioningHarness):
    def __init__(self) -> None:
        self.register = Register()

    @override
    def provisioning(self, *, privileged: bool) -> CaptureProvisioning:
        return ListProvisioning(self.register, may_add=privileged)

    @override
    def source_state(self) -> object:
        return set(self.register.streamed)

    @override
    def run(self, statement: str) -> None:
        self.register.run(statement)

    @override
    def streamed(self) -> set[TableName]:
        return set(self.register.streamed)


class TestListProvisioning(CaptureProvisioningConformance):
    @pytest.fixture
    def harness(self) -> RegisterHarness:
        return RegisterHarness()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out.endswith("satisfied: True\n")
