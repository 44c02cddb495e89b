"""The provisioning conformance suite fails for implementations that break a rule."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace

import pytest
from typing_extensions import override

from examples.list_provisioning import ListProvisioning
from penstock.contracts.provisioning import CaptureProvisioning, CoverageReport
from penstock.schema import TableName
from penstock.testing.provisioning_conformance import CaptureProvisioningConformance
from penstock.testing.rules import suite_tests
from tests.support.contract.breaking import caught, caught_by
from tests.support.contract.list_harnesses import RegisterHarness

SUITE = CaptureProvisioningConformance


@caught_by(SUITE.test_inspecting_changes_nothing)
class InspectsAndActs(ListProvisioning):
    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        report = super().inspect_coverage(required)
        self._register.streamed |= report.missing
        return report


@caught_by(
    SUITE.test_ensuring_does_nothing_when_not_managed, SUITE.test_ensuring_does_nothing_when_not_manageable
)
class ActsUnasked(ListProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        report = super().ensure_coverage(required, manage)
        self._register.streamed |= report.missing
        return report


@caught_by(SUITE.test_ensuring_reports_the_state_before_the_change)
class TellsWhatIsThereAfter(ListProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        super().ensure_coverage(required, manage)
        return self.inspect_coverage(required)


@caught_by(SUITE.test_ensuring_removes_no_table)
class Replaces(ListProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        report = super().ensure_coverage(required, manage)
        self._register.streamed &= required
        return report


@caught_by(SUITE.test_gap_is_closed_when_managed_and_manageable)
class NeverActs(ListProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        return self.inspect_coverage(required)


@caught_by(SUITE.test_tables_that_can_be_added_are_added_although_another_cannot)
class AddsAllOrNone(ListProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        return super().ensure_coverage(required, manage and self.inspect_coverage(required).manageable)


@caught_by(SUITE.test_ensuring_does_nothing_when_satisfied)
class AlwaysActs(ListProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        report = super().ensure_coverage(required, manage)
        if report.satisfied:
            self._register.streamed.add(TableName("public", f"act_{len(self._register.streamed)}"))
        return report


@caught_by(SUITE.test_report_divides_required_tables_into_present_and_missing)
class CountsOthersAsPresent(ListProvisioning):
    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        return replace(super().inspect_coverage(required), present=frozenset(required))


@caught_by(SUITE.test_remediation_closes_the_gap)
class HalfARemedy(ListProvisioning):
    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        report = super().inspect_coverage(required)
        return replace(report, remediation=report.remediation[:1])


class BrokenHarness(RegisterHarness):
    def __init__(self, broken: type[ListProvisioning]) -> None:
        super().__init__()
        self._broken = broken

    @override
    def provisioning(self, *, privileged: bool) -> CaptureProvisioning:
        return self._broken(self.register, may_add=privileged)


@pytest.mark.parametrize("test", list(suite_tests(SUITE)))
def test_broken_implementation_fails_the_suite(test: Callable[..., object]) -> None:
    assert caught.get(test), "no implementation is known that breaks this rule: is it one?"
    for broken in caught[test]:
        with pytest.raises(AssertionError):
            test(SUITE(), BrokenHarness(broken))
