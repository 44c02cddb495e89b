"""Route several source tables into one target table, and plan the changes of each table in an epoch.

A routed table has a name, a state and a target like any other table. In the publication and in the WAL there
are only its members. Its OID is a number that `schema.py` computes from its members and their schemas. A
target that was filled under another OID must be resynced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from penstock.change import ChangeCounts
from penstock.config.policies import Route
from penstock.errors import (
    ConnectionLostError,
    MembersDifferError,
    PenstockError,
    TableError,
    UnsupportedTableError,
)
from penstock.pipeline.table_states import TableStatus
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, check_mirrorable
from penstock.schema import TableName, TableSchema, is_routed, is_same_shape, joined_schema
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.evolution import ResyncRequired
from penstock.sinks.lineage import AlterationReader
from penstock.sinks.row_values import View
from penstock.spool.reader import FileSlice, SpoolRange, TableRange


def join_members(
    into: TableName,
    column: str,
    members: Mapping[TableName, CatalogTable],
    schemas: Mapping[TableName, TableSchema],
    refused: Mapping[TableName, PenstockError],
) -> tuple[CatalogTable, TableSchema]:
    """Return the routed table that `members` form, and its schema. Raises an error if one of the members
    cannot be mirrored.
    """
    if refused:
        name, error = min(refused.items(), key=lambda item: item[0])
        raise MembersDifferError(
            f"{name}, which is routed into {into}, cannot be mirrored: {error.message}", hint=error.hint
        )
    schema = joined_schema(into, column, [schemas[name] for name in members])
    check_mirrorable(schema, None)
    return CatalogTable(schema.oid, into, tuple(members[name] for name in sorted(members)), column), schema


def route_tables(
    tables: dict[TableName, CatalogTable],
    schemas: dict[TableName, TableSchema],
    refused: dict[TableName, PenstockError],
    route_of: Callable[[TableName], Route | None],
    check: Callable[[TableSchema], None],
) -> None:
    """Replace the members of each route by the routed table, in `tables`, `schemas` and `refused`. `check`
    raises an error for any other problem of the routed table.
    """
    routes = {name: route for name in (*tables, *refused) if (route := route_of(name)) is not None}
    groups: dict[Route, list[TableName]] = {}
    for name, route in routes.items():
        groups.setdefault(route, []).append(name)
    joined: dict[Route, tuple[CatalogTable, TableSchema]] = {}
    reasons: dict[TableName, PenstockError] = {}
    for route, names in groups.items():
        members = {name: tables.pop(name) for name in names if name in tables}
        shapes = {name: schemas.pop(name) for name in members}
        unfit = {name: refused.pop(name) for name in names if name in refused}
        try:
            joined[route] = join_members(route.into, route.source_column, members, shapes, unfit)
            check(joined[route][1])
        except TableError as error:
            reasons[route.into] = error
    for route, (table, schema) in joined.items():
        if route.into in tables:
            reasons[route.into] = UnsupportedTableError(
                f"{route.into} is itself a table of the pipeline, and other tables are routed into it",
                hint="choose another name for into:, exclude that table, or add it to the route",
            )
        tables[route.into], schemas[route.into] = table, schema
    refused.update(reasons)


def gather(target: Target, found: SpoolRange, known: Mapping[int, TableSchema]) -> TableChanges | None:
    """Return the changes of a target in a range of the spool; None if the range has no such changes. `known`
    has the schemas of routed tables by OID. Changes for a target with mode `append` include old rows.
    """

    def wanted(own: TableRange) -> tuple[FileSlice, ...]:
        return own.with_old if target.mode.is_log else own.slices

    if not is_routed(target.source_oid):
        own = found.tables.get(target.table)
        return None if own is None else _changes(target.table, wanted(own))
    schema = known.get(target.source_oid)
    if schema is None or schema.members is None:
        return TableChanges(target.table, (), ChangeCounts())  # `routed_views` then raises an error
    names, oids = ({getattr(member, what) for member in schema.members.schemas} for what in ("name", "oid"))
    # A renamed member has another name, a recreated one another OID: `routed_views` reports both.
    slices = [
        slice
        for each in found.tables.values()
        for slice in wanted(each)
        if slice.file.table in names or slice.file.oid in oids
    ]
    if not slices:
        return None
    slices.sort(key=lambda slice: slice.file.min_position.value)
    return _changes(target.table, slices)


def _changes(table: TableName, slices: Sequence[FileSlice]) -> TableChanges:
    return TableChanges(table, tuple(slices), sum((slice.file.counts for slice in slices), ChangeCounts()))


def routed_views(
    target: Target, changes: TableChanges, known: Mapping[int, TableSchema]
) -> dict[TableSchema, View]:
    """Return the column mapping for each schema of the changes. Raises `ResyncRequired` if a change comes
    from a table, or has a schema, that the routed table did not have when its target was filled.
    """
    schema = known.get(target.source_oid)
    if schema is None or schema.members is None:
        raise ConnectionLostError(
            f"the tables that are routed into {target.table} have changed since the catalog was last read"
        )
    source, members = schema.members.source_column, {member.name: member for member in schema.members.schemas}
    views: dict[TableSchema, View] = {}
    for version in set(changes.schemas):
        member = members.get(version.name)
        if member is None or not is_same_shape(version, member):
            raise ResyncRequired(f"its member {version.name} was altered, renamed or recreated")
        names = {name: name for name in version.column_names}
        views[version] = View(names, {source: pa.scalar(str(version.name), pa.string())}, source=source)
    return views


def is_behind(status: TableStatus, end: Position) -> bool:
    return status.is_applied and status.applied is not None and status.applied < end


def plan_work(
    targets: Mapping[TableName, Target],
    statuses: Mapping[TableName, TableStatus],
    ranges: Mapping[Position, SpoolRange],
    routed: Mapping[int, TableSchema],
    due: Collection[TableName],
    *,
    hints: AlterationReader,
) -> tuple[list[TableChanges], dict[TableName, Exception]]:
    """Collect the changes of each table after its applied position. Returns them in descending order of their
    row counts, and the tables for which this failed, each with its error.

    `routed` has the schemas of routed tables by OID. Tables in `due` are included even without changes.
    """
    work: list[TableChanges] = []
    failures: dict[TableName, Exception] = {}
    altered = {start: hints.read(each.messages) for start, each in ranges.items()}
    for name, status in statuses.items():
        if not status.is_applied or status.applied is None:
            continue
        try:
            found = (
                gather(targets[name], ranges[status.applied], routed) if status.applied in ranges else None
            )
        except Exception as error:  # noqa: BLE001 the edge of one table's work: the error policy decides
            failures[name] = error
            continue
        if found is not None:
            work.append(replace(found, alterations=altered[status.applied]))
        elif name in due:
            work.append(TableChanges(name, (), ChangeCounts()))
    return sorted(work, key=lambda changes: -changes.counts.rows), failures
