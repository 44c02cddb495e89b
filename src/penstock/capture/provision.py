"""Publication, then slot: what must be there before the first change can be captured.

`inspect_coverage` and `ensure_coverage` are the two acts of `penstock.contracts.provisioning`, for Postgres. `ensure_capture` is what a run
does at its start: it ensures the coverage, refuses what blocks it, and only then makes the slot.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.capture.blockers import ownership_blockers, partition_blockers, publication_blockers, relation_blockers, role_blockers
from penstock.contracts.provisioning import Blocker, CoverageReport
from penstock.errors import LockWaitError, PenstockError, SourceError, find_error
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.health import log_wait
from penstock.postgres.ownership import Trust
from penstock.postgres.partition_identity import inspect_partition_identities
from penstock.postgres.privileges import inspect_role
from penstock.postgres.publication import Addition, inspect_publication, inspect_publisher, inspect_relations
from penstock.postgres.slot import OnWait, Slot, check_server, check_slot, ensure_slot, inspect_server
from penstock.schema import TableName

_log = logging.getLogger(__name__)

_ATTEMPTS = 5


def inspect_coverage(
    address: SourceAddress, publication: str, required: Collection[TableName], *, old_rows: bool = False
) -> CoverageReport:
    """Compare `required` with what the publication holds, and with `old_rows` whether whole old rows travel. Changes nothing."""
    with connect(address) as connection:
        return plan_coverage(connection, publication, required, old_rows=old_rows).report


def ensure_coverage(
    address: SourceAddress, publication: str, required: Collection[TableName], manage: bool, *, old_rows: bool = False
) -> CoverageReport:
    """Close the gap if `manage` is set and this role may; gives back what was observed before acting."""
    with connect(address) as connection:
        first = plan = plan_coverage(connection, publication, required, old_rows=old_rows)
        for _ in range(_ATTEMPTS):
            if not manage or not plan.report.manageable or plan.run(connection):
                break
            # Somebody else made the publication, or added a table, just now: perhaps nothing is left to do, or something is in the way.
            plan = plan_coverage(connection, publication, required, old_rows=old_rows)
        else:
            raise LockWaitError(f"publication {publication} is being changed by somebody else, again and again")
        return plan.report if plan.report.blockers else first.report


def ensure_capture(
    address: SourceAddress,
    slot: str,
    publication: str,
    tables: Collection[TableName],
    *,
    failover: bool = False,
    old_rows: bool = False,
    on_wait: OnWait = log_wait,
) -> tuple[Slot, list[TableName]]:
    """Create what is missing, in the one order that is safe; gives back the slot, and the tables that were not being published.

    Changes that such a table had so far are in no log of ours. Does nothing when all is there. Raises if something is in the way.
    Creating a slot waits for open transactions; `on_wait` is told once a second for which.
    """
    with connect(address) as connection:
        server = inspect_server(connection)
        check_server(server)
        report = ensure_coverage(address, publication, tables, manage=True, old_rows=old_rows)
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

    def run(self, connection: Connection) -> bool:
        """Gives back whether it was done, as `Addition.run` does."""
        if self.addition is None:
            return True
        if not self.addition.run(connection):
            return False
        _log.info("publication extended", extra={"publication": self.publication, "tables": len(self.report.missing)})
        return True


def plan_coverage(connection: Connection, name: str, required: Collection[TableName], *, old_rows: bool = False) -> CoveragePlan:
    """Look at the publication, the relations and the role; a few statements, however many tables there are."""
    publication = inspect_publication(connection, name)
    relations = inspect_relations(connection, name, required)
    missing = [relation for relation in relations if not relation.is_published]
    unfit = list(relation_blockers(publication, relations))
    partitioned = [relation.name for relation in relations if relation.kind == "p"]
    unfit += partition_blockers(inspect_partition_identities(connection, partitioned, old_rows=old_rows))
    # What cannot be published, or must not be, has been named: it is in no statement of ours, and who owns it is of no interest.
    hopeless = {table for blocker in unfit for table in blocker.tables}
    wanting = [relation for relation in missing if relation.name not in hopeless]
    addition = Addition.plan(connection, name, wanting, exists=publication is not None) if wanting else None
    blockers = [
        *ownership_blockers(publication, relations, Trust.load(connection)),
        *publication_blockers(name, publication, relations),
        *unfit,
    ]
    if addition is not None:
        publisher = inspect_publisher(connection, name, wanting)
        blockers += role_blockers(name, publication, wanting, inspect_role(connection), statement=addition.text, publisher=publisher)
    report = CoverageReport(
        satisfied=not missing and not blockers,
        present=frozenset(relation.name for relation in relations if relation.is_published),
        missing=frozenset(relation.name for relation in missing),
        manageable=bool(missing) and not blockers,
        blockers=tuple(blockers),
        remediation=(addition.text,) if addition is not None else (),
    )
    return CoveragePlan(name, report, addition)
