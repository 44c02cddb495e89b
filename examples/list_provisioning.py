"""The smallest thing that keeps the contract of provisioning: a list of the tables that are streamed, and who
may add to it.

`Register` stands for the source. Run it to see a gap being reported and closed, or read it as a pattern for a
capture of your own that sets up what it needs: `tests/contract/test_list_provisioning.py` holds it to
`CaptureProvisioningConformance`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from typing_extensions import override

from penstock.contracts.provisioning import Blocker, CaptureProvisioning, CoverageReport
from penstock.errors import PrivilegeError
from penstock.schema import TableName


class Register:
    """The tables whose changes are streamed. It understands one statement, `ADD schema.table`."""

    def __init__(self) -> None:
        self.streamed: set[TableName] = set()

    def run(self, statement: str) -> None:
        self.streamed.add(TableName.parse(statement.removeprefix("ADD ")))


class ListProvisioning(CaptureProvisioning):
    """For a role that may add to the register, or for one that may only look."""

    def __init__(self, register: Register, *, may_add: bool) -> None:
        self._register = register
        self._may_add = may_add

    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        missing = frozenset(required - self._register.streamed)
        statements = tuple(f"ADD {table}" for table in sorted(missing))
        blocker = Blocker(
            PrivilegeError.code, "this role may only look", f"as somebody who may add: {' '.join(statements)}"
        )
        return CoverageReport(
            satisfied=not missing,
            present=frozenset(required & self._register.streamed),
            missing=missing,
            manageable=bool(missing) and self._may_add,
            blockers=(blocker,) if missing and not self._may_add else (),
            remediation=statements,  # whoever runs them
        )

    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        report = self.inspect_coverage(required)
        if manage and report.manageable:
            for statement in report.remediation:
                self._register.run(statement)
        return report  # of the moment before


def main() -> None:
    register, tables = Register(), {TableName("public", "orders"), TableName("public", "customers")}
    report = ListProvisioning(register, may_add=False).ensure_coverage(tables, manage=True)
    print("in the way:", *(blocker.what for blocker in report.blockers))
    print("to run:", *report.remediation, sep="\n  ")
    ListProvisioning(register, may_add=True).ensure_coverage(tables, manage=True)
    print("satisfied:", ListProvisioning(register, may_add=False).inspect_coverage(tables).satisfied)


if __name__ == "__main__":
    main()
