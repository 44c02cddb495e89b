"""Provision the change table and the triggers of a trigger capture. Implements
`penstock.contracts.provisioning` for `TriggerCapture`. Functions named `…_blockers` are pure.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.capture.provision import table_sql, write_blockers
from penstock.capture.source_checks import gap_text
from penstock.contracts.provisioning import Blocker, CoverageReport
from penstock.errors import (
    ChangeTableMissingError,
    NoTablesError,
    PrivilegeError,
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
from penstock.postgres.catalog import outside_kind
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.queries import identifier
from penstock.postgres.server import Role, inspect_role
from penstock.schema import TableName

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TriggerPlan:
    """The observed coverage, and the statements that create the missing objects of all tables without
    blockers.
    """

    report: CoverageReport
    installation: Installation


def inspect_trigger_coverage(
    address: SourceAddress, schema: str, required: Collection[TableName]
) -> CoverageReport:
    """Compare `required` with the tables that have triggers. Read only."""
    with connect(address) as connection:
        return plan_trigger_coverage(connection, schema, required).report


def ensure_trigger_coverage(
    address: SourceAddress,
    schema: str,
    required: Collection[TableName],
    manage: bool,
    *,
    partly: bool = False,
) -> CoverageReport:
    """Add missing triggers if `manage` is set and the role has the right. If blockers affect some of the
    tables, add none, or with `partly` the others. Returns the coverage before the change.
    """
    with connect(address) as connection:
        plan = plan_trigger_coverage(connection, schema, required)
        if manage and (plan.report.manageable or (partly and plan.report.addable)):
            plan.installation.run(connection)
            _log.info("triggers set up", extra={"schema": schema, "tables": len(plan.installation.tables)})
        return plan.report


def plan_trigger_coverage(
    connection: Connection, schema: str, required: Collection[TableName]
) -> TriggerPlan:
    """Inspect the change table, the relations and the role, with a fixed number of statements."""
    facts = inspect_change_table(connection, schema)
    relations = inspect_triggered(connection, schema, required)
    role = inspect_role(connection)
    is_ready = facts is not None and facts.is_whole
    missing = [relation for relation in relations if not (is_ready and relation.has_triggers)]
    refusal = None if facts is None else facts.refusal(schema)
    unfit = [] if refusal is None else [Blocker(refusal.code, refusal.message, refusal.hint or "")]
    unfit += [blocker for relation in relations for blocker in relation_blockers(schema, relation)]
    # The statements leave out tables with blockers, which are reported already.
    blocked_tables = {table for blocker in unfit for table in blocker.tables}
    wanting = [
        relation for relation in missing if relation.name not in blocked_tables and not relation.has_triggers
    ]
    needs_table = not is_ready
    installation = Installation(
        schema,
        role.name,
        needs_table,
        tuple(relation.name for relation in wanting),
        needs_schema=facts is None,
    )
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
    addable = tuple(table for table in installation.tables if table in report.addable)
    return TriggerPlan(report, replace(installation, tables=addable))


def check_usable(connection: Connection, schema: str, coverage: CoverageReport | None = None) -> None:
    """Raise unless the change table exists and this role may read it and delete from it. The blockers in
    `coverage` explain why the capture has not created the change table.
    """
    facts = inspect_change_table(connection, schema) if has_change_table(connection, schema) else None
    if facts is None:
        raise ChangeTableMissingError(
            f"the change table {schema} does not exist, so changes are not recorded",
            hint=gap_text(coverage)
            if coverage is not None and coverage.blockers
            else "let the capture create it, with with_trigger_management, or run the statements of its "
            "coverage report",
        )
    if not facts.is_usable:
        role = inspect_role(connection)
        raise PrivilegeError(
            f"role {role.name} may not use the change table {schema}", hint=grant_text(schema, role.name)
        )


def relation_blockers(schema: str, relation: TriggeredRelation) -> Iterator[Blocker]:
    """Blockers of a relation: the reasons why its changes cannot be captured."""
    name, table = relation.name, table_sql(relation.name)
    if relation.oid is None:
        yield Blocker(
            NoTablesError.code,
            f"there is no table {name} in the source",
            "check the name, which is case-sensitive",
            (name,),
        )
        return
    if name.schema == schema:
        yield Blocker(
            UnsupportedTableError.code, f"{name} is part of the capture itself", "exclude the table", (name,)
        )
        return
    kind = outside_kind(relation.kind, relation.persistence)
    if kind is not None:
        remedy = (
            f"ALTER TABLE {table} SET LOGGED;"
            if kind == "unlogged"
            else "capture the tables that its rows come from"
        )
        why = (
            "a crash of the server empties it in silence"
            if kind == "unlogged"
            else "its rows change elsewhere"
        )
        yield Blocker(UnsupportedTableError.code, f"{name} is {kind}: {why}", remedy, (name,))
        return
    if relation.root is not None:
        what = f"{name} is a partition: its changes arrive under the name of its root, {relation.root}"
        yield Blocker(UnsupportedTableError.code, what, f"capture {relation.root} instead", (name,))
    for partition in relation.apart:
        yield Blocker(
            UnsupportedTableError.code,
            f"partition {partition} of table {name} is unlogged or foreign: changes of its rows may be "
            "missed",
            f"ALTER TABLE {partition} SET LOGGED; "
            f"or, if it is foreign: ALTER TABLE {table} DETACH PARTITION {partition};",
            (name,),
        )


def role_blockers(
    schema: str,
    facts: ChangeTableFacts | None,
    wanting: Sequence[TriggeredRelation],
    role: Role,
    installation: Installation,
) -> Iterator[Blocker]:
    """Blockers for the rights that the role lacks to create the missing objects."""
    statements = " ".join(installation.texts)
    yield from write_blockers(role, statements)
    if role.is_on_standby:
        return
    if facts is None and not role.may_create:
        yield Blocker(
            PrivilegeError.code,
            f"role {role.name} may not create the schema {schema} in database {role.database}",
            f"{role.creation_grant()} or, as a role that may: {statements}",
        )
    # All objects in the schema must belong to the owner of the schema.
    is_owner = facts is None or (facts.is_own if installation.needs_table else facts.is_ours or not wanting)
    if facts is not None and not is_owner:
        yield Blocker(
            PrivilegeError.code,
            f"schema {schema} belongs to {facts.owner}, so role {role.name} may not add the missing objects",
            f"as {identifier(facts.owner)}: {statements}",
        )
    yield from _ownership(schema, wanting, role, installation)


def _ownership(
    schema: str, wanting: Sequence[TriggeredRelation], role: Role, installation: Installation
) -> Iterator[Blocker]:
    """One blocker for all tables on which the role may not create triggers, since the same statements remove
    it.
    """
    foreign: dict[str, list[TableName]] = defaultdict(list)
    for relation in wanting:
        if not (relation.is_ours and relation.is_reachable) and relation.owner is not None:
            foreign[relation.owner].append(relation.name)
    if foreign:
        reasons = [
            f"only {owner}, who owns {', '.join(map(str, names))}, may give it triggers"
            for owner, names in foreign.items()
        ]
        tables = tuple(sorted(table for names in foreign.values() for table in names))
        who, statements = (
            "as a superuser, or as their owner, who must then be in trusted_roles",
            " ".join(installation.texts),
        )
        if not installation.needs_table:
            who = f"as a superuser; or the grants as role {role.name}, and the rest as their owner"
            statements = " ".join([*(attach_grant_text(schema, owner) for owner in foreign), statements])
        yield Blocker(PrivilegeError.code, "; ".join(reasons), f"{who}: {statements}", tables)
