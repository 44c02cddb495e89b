"""The smallest implementation of the provisioning contract: a list of the streamed tables, and the permission
to add to it.

`Register` represents the source. Run it to see a gap being reported and closed, or use it as a template for
your own capture that provisions its objects: `tests/contract/test_list_provisioning.py` runs
`CaptureProvisioningConformance` against it.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from typing_extensions import override

from penstock.contracts.provisioning import Blocker, CaptureProvisioning, CoverageReport
from penstock.errors import NoTablesError, PrivilegeError
from penstock.schema import TableName


class Register:
    """The tables of the source, and those whose changes are streamed. It understands one statement, `ADD
    schema.table`.
    """

    def __init__(self, *tables: TableName) -> None:
        self.tables = frozenset(tables)
        self.streamed: set[TableName] = set()

    def run(self, statement: str) -> None:
        self.streamed.add(TableName.parse(statement.removeprefix("ADD ")))


class ListProvisioning(CaptureProvisioning):
    """Provisioning for a role that may add to the register, or for a read-only role."""

    def __init__(self, register: Register, *, may_add: bool) -> None:
        self._register = register
        self._may_add = may_add

    @override
    def inspect_coverage(self, required: AbstractSet[TableName]) -> CoverageReport:
        missing = frozenset(required - self._register.streamed)
        absent, addable = sorted(missing - self._register.tables), sorted(missing & self._register.tables)
        statements = tuple(f"ADD {table}" for table in addable)
        blockers = [
            Blocker(NoTablesError.code, f"there is no table {table}", "check the name", (table,))
            for table in absent
        ]
        if addable and not self._may_add:
            remedy = f"as a role that may add: {' '.join(statements)}"
            blockers.append(Blocker(PrivilegeError.code, "this role is read-only", remedy, tuple(addable)))
        return CoverageReport(
            satisfied=not missing,
            present=frozenset(required & self._register.streamed),
            missing=missing,
            manageable=bool(missing) and not blockers,
            blockers=tuple(blockers),
            remediation=statements,  # the same for every role
        )

    @override
    def ensure_coverage(self, required: AbstractSet[TableName], manage: bool) -> CoverageReport:
        report = self.inspect_coverage(required)
        if manage:
            for table in sorted(report.addable):
                self._register.run(f"ADD {table}")
        return report  # the state before the change


def main() -> None:
    tables = {TableName("public", "orders"), TableName("public", "customers")}
    register = Register(*tables)
    report = ListProvisioning(register, may_add=False).ensure_coverage(tables, manage=True)
    print("in the way:", *(blocker.what for blocker in report.blockers))
    print("to run:", *report.remediation, sep="\n  ")
    ListProvisioning(register, may_add=True).ensure_coverage(tables, manage=True)
    print("satisfied:", ListProvisioning(register, may_add=False).inspect_coverage(tables).satisfied)


if __name__ == "__main__":
    main()
