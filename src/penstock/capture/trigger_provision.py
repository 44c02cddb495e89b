"""The change table, then triggers: what must be there before a change can be captured without the log.

The two acts of `penstock.contracts.provisioning`, for `TriggerCapture`. From what was observed at the source to blockers is pure.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from penstock.capture.blockers import outside_kind, table_sql
from penstock.contracts.provisioning import Blocker, CoverageReport
from penstock.errors import (
    ChangeTableMissingError,
    NoTablesError,
    PrivilegeError,
    ServerUnfitError,
    StandbyError,
    UnsupportedTableError,
)
from penstock.postgres.capture_triggers import (
    ChangeTableFacts,
    Installation,
    TriggeredRelation,
    attach_grant_text,
    grant_text,
    has_change_table,
    inspect_change_table,
    inspect_triggered,
)
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.privileges import Role, inspect_role
from penstock.postgres.queries import identifier
from penstock.schema import TableName

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TriggerPlan:
    """What was observed, and what would close the gap."""

    report: CoverageReport
    installation: Installation


def inspect_coverage(address: SourceAddress, schema: str, required: Collection[TableName]) -> CoverageReport:
    """Compare `required` with the tables that have triggers. Changes nothing."""
    with connect(address) as connection:
        return plan_coverage(connection, schema, required).report


def ensure_coverage(address: SourceAddress, schema: str, required: Collection[TableName], manage: bool) -> CoverageReport:
    """Close the gap if `manage` is set and this role may; gives back what was observed before acting."""
    with connect(address) as connection:
        plan = plan_coverage(connection, schema, required)
        if manage and plan.report.manageable:
            plan.installation.run(connection)
            _log.info("triggers set up", extra={"schema": schema, "tables": len(plan.installation.tables)})
        return plan.report


def plan_coverage(connection: Connection, schema: str, required: Collection[TableName]) -> TriggerPlan:
    """Look at the change table, the relations and the role; a few statements, however many tables there are."""
    facts = inspect_change_table(connection, schema)
    relations = inspect_triggered(connection, schema, required)
    role = inspect_role(connection)
    is_ready = facts is not None and facts.is_whole
    missing = [relation for relation in relations if not (is_ready and relation.is_noted)]
    refusal = None if facts is None else facts.refusal(schema)
    unfit = [] if refusal is None else [Blocker(refusal.code, refusal.message, refusal.hint or "")]
    unfit += [blocker for relation in relations for blocker in relation_blockers(schema, relation)]
    # What cannot be captured has been named: it is in no statement of ours.
    hopeless = {table for blocker in unfit for table in blocker.tables}
    wanting = [relation for relation in missing if relation.name not in hopeless and not relation.is_noted]
    needs_table = not is_ready
    installation = Installation(schema, role.name, needs_table, tuple(relation.name for relation in wanting), needs_schema=facts is None)
    has_gap = needs_table or bool(wanting)
    blockers = [*unfit, *(role_blockers(schema, facts, wanting, role, installation) if has_gap else ())]
    report = CoverageReport(
        satisfied=not has_gap and not missing and not blockers,
        present=frozenset(relation.name for relation in relations) - {relation.name for relation in missing},
        missing=frozenset(relation.name for relation in missing),
        manageable=has_gap and not blockers,
        blockers=tuple(blockers),
        remediation=installation.texts if has_gap else (),
    )
    return TriggerPlan(report, installation)


def check_usable(connection: Connection, schema: str) -> None:
    """Raise unless the change table is there, and is this role's to read and to remove from."""
    facts = inspect_change_table(connection, schema) if has_change_table(connection, schema) else None
    if facts is None:
        raise ChangeTableMissingError(
            f"the change table {schema} is not there: nothing writes down what changes",
            hint="let the capture set it up, by with_trigger_management, or run the statements that its coverage report has",
        )
    if not facts.is_usable:
        role = inspect_role(connection)
        raise PrivilegeError(f"role {role.name} may not use the change table {schema}", hint=grant_text(schema, role.name))


def relation_blockers(schema: str, relation: TriggeredRelation) -> Iterator[Blocker]:
    """What a relation cannot do."""
    name, table = relation.name, table_sql(relation.name)
    if relation.oid is None:
        yield Blocker(NoTablesError.code, f"there is no table {name} in the source", "check the name; case counts", (name,))
        return
    if name.schema == schema:
        yield Blocker(UnsupportedTableError.code, f"{name} is part of the capture itself", "exclude the table", (name,))
        return
    kind = outside_kind(relation.kind, relation.persistence)
    if kind is not None:
        remedy = f"ALTER TABLE {table} SET LOGGED;" if kind == "unlogged" else "capture the tables that its rows come from"
        why = "a crash of the server empties it in silence" if kind == "unlogged" else "its rows change elsewhere"
        yield Blocker(UnsupportedTableError.code, f"{name} is {kind}: {why}", remedy, (name,))
        return
    if relation.root is not None:
        what = f"{name} is a partition of {relation.root}, and its changes arrive under that name"
        yield Blocker(UnsupportedTableError.code, what, f"ask for {relation.root} instead", (name,))
    for partition in relation.apart:
        yield Blocker(
            UnsupportedTableError.code,
            f"partition {partition} of table {name} is unlogged or foreign: not all that becomes of its rows is seen",
            f"ALTER TABLE {partition} SET LOGGED; or, if it is foreign: ALTER TABLE {table} DETACH PARTITION {partition};",
            (name,),
        )


def role_blockers(
    schema: str, facts: ChangeTableFacts | None, wanting: Sequence[TriggeredRelation], role: Role, installation: Installation
) -> Iterator[Blocker]:
    """What the role may not do that the gap needs."""
    statements = " ".join(installation.texts)
    if role.is_on_standby:
        yield Blocker(StandbyError.code, "the server is a standby, on which nothing can be created", f"on the primary: {statements}")
        return
    if role.is_read_only:
        yield Blocker(
            ServerUnfitError.code,
            f"transactions of role {role.name} are read-only",
            f"ALTER ROLE {role.identifier} SET default_transaction_read_only = off;",
        )
    if facts is None and not role.may_create:
        yield Blocker(
            PrivilegeError.code,
            f"role {role.name} may not create the schema {schema} in database {role.database}",
            f"{role.creation_grant()} or, as somebody who may: {statements}",
        )
    # What is made has one owner, that of the schema.
    is_his = facts is None or (facts.is_own if installation.needs_table else facts.is_ours or not wanting)
    if facts is not None and not is_his:
        yield Blocker(
            PrivilegeError.code,
            f"schema {schema} belongs to {facts.owner}, and what is missing is not role {role.name}'s to add",
            f"as {identifier(facts.owner)}: {statements}",
        )
    yield from _ownership(schema, wanting, role, installation)


def _ownership(schema: str, wanting: Sequence[TriggeredRelation], role: Role, installation: Installation) -> Iterator[Blocker]:
    """One reason, since the same statements mend it."""
    foreign: dict[str, list[TableName]] = defaultdict(list)
    for relation in wanting:
        if not (relation.is_ours and relation.is_reachable) and relation.owner is not None:
            foreign[relation.owner].append(relation.name)
    if foreign:
        reasons = [f"only {owner}, who owns {', '.join(map(str, names))}, may give it triggers" for owner, names in foreign.items()]
        tables = tuple(sorted(table for names in foreign.values() for table in names))
        who, statements = "as a superuser, or as their owner, which trusted_roles has to name then", " ".join(installation.texts)
        if not installation.needs_table:
            who = f"as a superuser; or the grants as role {role.name}, and the rest as their owner"
            statements = " ".join([*(attach_grant_text(schema, owner) for owner in foreign), statements])
        yield Blocker(PrivilegeError.code, "; ".join(reasons), f"{who}: {statements}", tables)
