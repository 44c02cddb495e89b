"""The provisioning suite itself, on a source that is a set of names: it passes who keeps the rules and catches who breaks them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import pytest
from typing_extensions import override

from penstock.contracts.provisioning import Blocker, CaptureProvisioning, CoverageReport
from penstock.schema import TableName
from penstock.testing.provisioning_conformance import CaptureProvisioningConformance, ProvisioningHarness

SUITE = CaptureProvisioningConformance

caught: dict[str, type[SetProvisioning]] = {}


def caught_by(*tests: Callable[..., object]) -> Callable[[type[SetProvisioning]], type[SetProvisioning]]:
    def note(broken: type[SetProvisioning]) -> type[SetProvisioning]:
        caught.update({test.__name__: broken for test in tests})
        return broken

    return note


class SetProvisioning(CaptureProvisioning):
    def __init__(self, streamed: set[TableName], privileged: bool) -> None:
        self.streamed = streamed
        self.privileged = privileged

    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        missing = frozenset(required - self.streamed)
        return CoverageReport(
            satisfied=not missing,
            present=frozenset(required & self.streamed),
            missing=missing,
            manageable=bool(missing) and self.privileged,
            blockers=(Blocker("X", "may not", "let it"),) if missing and not self.privileged else (),
            remediation=tuple(f"add {table}" for table in sorted(missing)),
        )

    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        report = self.inspect_coverage(required)
        if manage and report.manageable:
            self.streamed |= report.missing
        return report


@caught_by(SUITE.test_inspecting_changes_nothing)
class InspectsAndActs(SetProvisioning):
    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        report = super().inspect_coverage(required)
        self.streamed |= report.missing
        return report


@caught_by(SUITE.test_ensuring_does_nothing_when_not_managed, SUITE.test_ensuring_does_nothing_when_not_manageable)
class ActsUnasked(SetProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        report = super().ensure_coverage(required, manage)
        self.streamed |= report.missing
        return report


@caught_by(SUITE.test_ensuring_tells_what_was_there_before)
class TellsWhatIsThereAfter(SetProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        super().ensure_coverage(required, manage)
        return self.inspect_coverage(required)


@caught_by(SUITE.test_ensuring_takes_nothing_away)
class Replaces(SetProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        report = super().ensure_coverage(required, manage)
        self.streamed &= required
        return report


@caught_by(SUITE.test_gap_is_closed_when_managed_and_manageable)
class NeverActs(SetProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        return self.inspect_coverage(required)


@caught_by(SUITE.test_ensuring_does_nothing_when_satisfied)
class AlwaysActs(SetProvisioning):
    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        report = super().ensure_coverage(required, manage)
        if report.satisfied:
            self.streamed.add(TableName("public", f"act_{len(self.streamed)}"))
        return report


@caught_by(SUITE.test_report_divides_what_is_required_into_present_and_missing)
class CountsOthersAsPresent(SetProvisioning):
    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        report = super().inspect_coverage(required)
        return CoverageReport(report.satisfied, frozenset(required), report.missing, report.manageable, report.blockers, report.remediation)


@caught_by(SUITE.test_remediation_closes_the_gap)
class HalfARemedy(SetProvisioning):
    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        report = super().inspect_coverage(required)
        half = report.remediation[:1]
        return CoverageReport(report.satisfied, report.present, report.missing, report.manageable, report.blockers, half)


class SetHarness(ProvisioningHarness):
    def __init__(self, kind: type[SetProvisioning] = SetProvisioning) -> None:
        self._kind = kind
        self._streamed: set[TableName] = set()

    @override
    def provisioning(self, *, privileged: bool) -> CaptureProvisioning:
        return self._kind(self._streamed, privileged)

    @override
    def source_state(self) -> object:
        return set(self._streamed)

    @override
    def run(self, statement: str) -> None:
        self._streamed.add(TableName.parse(statement.removeprefix("add ")))

    @override
    def streamed(self) -> set[TableName]:
        return set(self._streamed)


class TestSetProvisioning(CaptureProvisioningConformance):
    @pytest.fixture
    def harness(self) -> SetHarness:
        return SetHarness()


@pytest.mark.parametrize("test", [name for name, _ in inspect.getmembers(SUITE, inspect.isfunction) if name.startswith("test_")])
def test_whoever_breaks_the_rule_is_caught(test: str) -> None:
    with pytest.raises(AssertionError):
        getattr(SUITE(), test)(SetHarness(caught[test]))
