"""Publication, then slot: what must be there before the first change can be captured.

`inspect_coverage` and `ensure_coverage` are the two acts of `penstock.contracts.provisioning`, for Postgres. `ensure_capture` is what a run
does at its start: it ensures the coverage, refuses what blocks it, and only then makes the slot.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.capture.blockers import publication_blockers, relation_blockers, role_blockers
from penstock.contracts.provisioning import Blocker, CoverageReport
from penstock.errors import PenstockError, SourceError, find_error
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.health import log_wait
from penstock.postgres.limits import check_version
from penstock.postgres.privileges import inspect_role
from penstock.postgres.publication import Addition, inspect_publication, inspect_relations
from penstock.postgres.slot import OnWait, Slot, check_server, check_slot, ensure_slot, inspect_server
from penstock.schema import TableName

_log = logging.getLogger(__name__)


def inspect_coverage(address: SourceAddress, publication: str, required: Collection[TableName]) -> CoverageReport:
    """Compare `required` with what the publication holds. Changes nothing."""
    with connect(address) as connection:
        return plan_coverage(connection, publication, required).report


def ensure_coverage(address: SourceAddress, publication: str, required: Collection[TableName], manage: bool) -> CoverageReport:
    """Close the gap if `manage` is set and this role may; gives back what was observed before acting."""
    with connect(address) as connection:
        plan = plan_coverage(connection, publication, required)
        if manage and plan.report.manageable:
            plan.run(connection)
        return plan.report


def ensure_capture(
    address: SourceAddress,
    slot: str,
    publication: str,
    tables: Collection[TableName],
    *,
    failover: bool = False,
    on_wait: OnWait = log_wait,
) -> tuple[Slot, list[TableName]]:
    """Create what is missing, in the one order that is safe; gives back the slot, and the tables that were not being published.

    Changes that such a table had so far are in no log of ours. Does nothing when all is there. Raises if something is in the way.
    Creating a slot waits for open transactions; `on_wait` is told once a second for which.
    """
    with connect(address) as connection:
        server = inspect_server(connection)
        check_server(server)
        check_version(server.version)
        report = ensure_coverage(address, publication, tables, manage=True)
        check_coverage(report)
        found = ensure_slot(address, connection, slot, failover, on_wait)
        check_slot(found, server.database)
        return found, sorted(report.missing)


def check_coverage(report: CoverageReport) -> None:
    """Raise what blocks, all of it at once; the class of the error is that of the first reason."""
    if report.blockers:
        raise blocked(report.blockers)


def blocked(blockers: Sequence[Blocker]) -> PenstockError:
    """The reasons as one error."""
    error = find_error(blockers[0].code) or SourceError
    what = "; ".join(dict.fromkeys(blocker.what for blocker in blockers))
    return error(what, hint=" ".join(dict.fromkeys(blocker.remedy for blocker in blockers)))


@dataclass(frozen=True, slots=True)
class CoveragePlan:
    """What was observed, and what would close the gap."""

    publication: str
    report: CoverageReport
    addition: Addition | None

    def run(self, connection: Connection) -> None:
        if self.addition is not None:
            self.addition.run(connection)
            _log.info("publication extended", extra={"publication": self.publication, "tables": len(self.report.missing)})


def plan_coverage(connection: Connection, name: str, required: Collection[TableName]) -> CoveragePlan:
    """Look at the publication, the relations and the role; three statements, however many tables there are."""
    publication = inspect_publication(connection, name)
    relations = inspect_relations(connection, name, required)
    missing = [relation for relation in relations if not relation.is_published]
    addition = Addition.plan(connection, name, missing, exists=publication is not None) if missing else None
    blockers = [*publication_blockers(name, publication, relations), *relation_blockers(publication, relations)]
    # What cannot be published at all has been named; who owns it is of no interest then.
    hopeless = {table for blocker in blockers for table in blocker.tables}
    wanting = [relation for relation in missing if relation.name not in hopeless]
    if wanting and addition is not None:
        blockers += role_blockers(name, publication, wanting, inspect_role(connection), addition.text)
    report = CoverageReport(
        satisfied=not missing and not blockers,
        present=frozenset(relation.name for relation in relations if relation.is_published),
        missing=frozenset(relation.name for relation in missing),
        manageable=bool(missing) and not blockers,
        blockers=tuple(blockers),
        remediation=(addition.text,) if addition is not None else (),
    )
    return CoveragePlan(name, report, addition)
