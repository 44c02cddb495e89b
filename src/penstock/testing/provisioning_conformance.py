"""Conformance suite for `CaptureProvisioning`.

Write a `ProvisioningHarness` for the source. In a pytest module, subclass `CaptureProvisioningConformance`
and return a new harness for each test from the fixture `harness`; `capture_conformance` shows such a module.
`examples/list_provisioning.py` is an implementation that passes the suite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from penstock.contracts.provisioning import CaptureProvisioning, CoverageReport
from penstock.schema import TableName
from penstock.testing.rules import rule


class ProvisioningHarness(ABC):
    """A source with three tables, none of them captured yet."""

    tables: tuple[TableName, TableName, TableName] = (
        TableName("public", "conformance_a"),
        TableName("public", "conformance_b"),
        TableName("public", "conformance_c"),
    )

    absent = TableName("public", "conformance_absent")
    """A table that the source does not have, so that no role can add it."""

    @abstractmethod
    def provisioning(self, *, privileged: bool) -> CaptureProvisioning:
        """A new `CaptureProvisioning`: with a role that may create objects if `privileged`, otherwise with a
        read-only role.
        """

    @abstractmethod
    def source_state(self) -> object:
        """Everything in the source that provisioning could modify, as a comparable value."""

    @abstractmethod
    def run(self, statement: str) -> None:
        """Execute a remediation statement, as an operator would."""

    @abstractmethod
    def streamed(self) -> set[TableName]:
        """The tables that are captured now."""


class CaptureProvisioningConformance:
    """One test per rule of the contract; the test's name states the rule."""

    @rule("wal_change_capture", "inspect_coverage()", "never-mutates")
    def test_inspecting_changes_nothing(self, harness: ProvisioningHarness) -> None:
        before = harness.source_state()
        for privileged in (True, False):
            harness.provisioning(privileged=privileged).inspect_coverage(set(harness.tables))
        assert harness.source_state() == before, "inspect_coverage must not change the source"

    @rule("wal_change_capture", "inspect_coverage()", "inspect")
    def test_report_divides_required_tables_into_present_and_missing(
        self, harness: ProvisioningHarness
    ) -> None:
        first, *others = harness.tables
        harness.provisioning(privileged=True).ensure_coverage({first}, manage=True)
        report = harness.provisioning(privileged=True).inspect_coverage(set(harness.tables))
        assert (report.present, report.missing) == (frozenset({first}), frozenset(others))
        assert (report.satisfied, report.manageable) == (False, True)

    @rule("wal_change_capture", "ensure_coverage()", "ensure", "publication-managed")
    def test_gap_is_closed_when_managed_and_manageable(self, harness: ProvisioningHarness) -> None:
        required = set(harness.tables)
        harness.provisioning(privileged=True).ensure_coverage(required, manage=True)
        assert harness.streamed() >= required
        report = harness.provisioning(privileged=True).inspect_coverage(required)
        assert report.satisfied, report
        assert (report.present, report.missing, report.blockers) == (frozenset(required), frozenset(), ())

    @rule("wal_change_capture", "ensure_coverage()", "before-acting")
    def test_ensuring_reports_the_state_before_the_change(self, harness: ProvisioningHarness) -> None:
        required = set(harness.tables)
        provisioning = harness.provisioning(privileged=True)
        expected = provisioning.inspect_coverage(required)
        report = provisioning.ensure_coverage(required, manage=True)
        assert report == expected, "the report describes the source before the changes"
        assert not report.satisfied

    @rule("wal_change_capture", "ensure")
    def test_ensuring_does_nothing_when_not_managed(self, harness: ProvisioningHarness) -> None:
        before = harness.source_state()
        report = harness.provisioning(privileged=True).ensure_coverage(set(harness.tables), manage=False)
        assert harness.source_state() == before, "manage=False must not change the source"
        check_unsatisfied(report)

    @rule("wal_change_capture", "ensure")
    def test_ensuring_does_nothing_when_not_manageable(self, harness: ProvisioningHarness) -> None:
        before = harness.source_state()
        report = harness.provisioning(privileged=False).ensure_coverage(set(harness.tables), manage=True)
        assert harness.source_state() == before, "without privileges nothing may be changed, not even partly"
        assert not report.manageable
        check_unsatisfied(report)
        assert report.blockers, "blockers must give the reason"

    @rule("wal_change_capture", "ensure_coverage()", "ensure")
    def test_tables_that_can_be_added_are_added_although_another_cannot(
        self, harness: ProvisioningHarness
    ) -> None:
        addable, required = frozenset(harness.tables), frozenset({*harness.tables, harness.absent})
        provisioning = harness.provisioning(privileged=True)
        expected = provisioning.inspect_coverage(required)
        assert (expected.missing, expected.addable) == (required, addable)
        report = provisioning.ensure_coverage(required, manage=True)
        assert harness.streamed() >= addable
        assert report == expected, "the report describes the source before the changes"
        rest = provisioning.inspect_coverage(required)
        for each in (report, rest):
            assert not each.satisfied
            assert not each.manageable
            assert any(harness.absent in blocker.tables for blocker in each.blockers)
        assert (rest.present, rest.missing) == (addable, frozenset({harness.absent}))
        assert not rest.addable

    @rule("wal_change_capture", "satisfied")
    def test_ensuring_does_nothing_when_satisfied(self, harness: ProvisioningHarness) -> None:
        required = set(harness.tables)
        harness.provisioning(privileged=True).ensure_coverage(required, manage=True)
        before = harness.source_state()
        for privileged in (True, False):
            report = harness.provisioning(privileged=privileged).ensure_coverage(required, manage=True)
            assert report.satisfied, report
        assert harness.source_state() == before, "satisfied coverage must not be changed"

    def test_ensuring_removes_no_table(self, harness: ProvisioningHarness) -> None:
        first, second, third = harness.tables
        provisioning = harness.provisioning(privileged=True)
        provisioning.ensure_coverage({first, second}, manage=True)
        provisioning.ensure_coverage({third}, manage=True)
        assert harness.streamed() >= {first, second, third}

    def test_remediation_closes_the_gap(self, harness: ProvisioningHarness) -> None:
        required = set(harness.tables)
        report = harness.provisioning(privileged=False).inspect_coverage(required)
        assert report.remediation
        for statement in report.remediation:
            harness.run(statement)
        after = harness.provisioning(privileged=False).inspect_coverage(required)
        assert after.satisfied, after


def check_unsatisfied(report: CoverageReport) -> None:
    assert not report.satisfied
    assert report.missing
    assert report.remediation, "the remediation must list the missing statements"
