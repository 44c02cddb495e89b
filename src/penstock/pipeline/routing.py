"""Tables that go into one: the table of the pipeline that they make together, and what the log has for it.

Such a table has a name, a state and a target like any other. Its members are what the publication holds and what the log names. What they
are together has a number (`postgres/routed.py`); a target that was filled under another number is no copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from penstock.change import ChangeCounts
from penstock.errors import ConnectionLostError, MembersDifferError, PenstockError, TableError, UnsupportedTableError
from penstock.pipeline.routes import Route
from penstock.postgres.catalog import CatalogTable, check_mirrorable
from penstock.postgres.routed import is_routed, is_same_shape, joined_schema
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.evolution import CopyAnew
from penstock.sinks.layout import Mode
from penstock.sinks.views import View
from penstock.spool.range import FileSlice, SpoolRange, TableRange


def join_members(
    into: TableName,
    column: str,
    members: Mapping[TableName, CatalogTable],
    schemas: Mapping[TableName, TableSchema],
    refused: Mapping[TableName, PenstockError],
) -> tuple[CatalogTable, TableSchema]:
    """The table that `members` make together. Raises why there is none: a member that cannot be mirrored takes the others along."""
    if refused:
        name, error = min(refused.items(), key=lambda item: item[0])
        raise MembersDifferError(f"{name}, which is routed into {into}, cannot be mirrored: {error.message}", hint=error.hint)
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
    """Put in place of all that is routed what it makes together. `check` raises what else is wrong with that."""
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
                f"{route.into} is itself a table of the pipeline, and others are routed into it",
                hint="choose another name for into:, exclude that table, or route it there too",
            )
        tables[route.into], schemas[route.into] = table, schema
    refused.update(reasons)


def gather(target: Target, found: SpoolRange, known: Mapping[int, TableSchema]) -> TableChanges | None:
    """What the log has for a target; None if nothing. `known` has routed tables by their numbers. A log of changes has old rows too."""

    def wanted(own: TableRange) -> tuple[FileSlice, ...]:
        return own.with_old if target.mode is Mode.APPEND else own.slices

    if not is_routed(target.source_oid):
        own = found.tables.get(target.table)
        return None if own is None else _changes(target.table, wanted(own))
    schema = known.get(target.source_oid)
    if schema is None or schema.members is None:
        return TableChanges(target.table, (), ChangeCounts())  # for `routed_views` to say
    names, oids = ({getattr(member, what) for member in schema.members.schemas} for what in ("name", "oid"))
    # One that was renamed comes under another name, one that was made anew with another OID: both are for `routed_views` to find.
    slices = [slice for each in found.tables.values() for slice in wanted(each) if slice.file.table in names or slice.file.oid in oids]
    if not slices:
        return None
    slices.sort(key=lambda slice: slice.file.min_position.value)
    return _changes(target.table, slices)


def _changes(table: TableName, slices: Sequence[FileSlice]) -> TableChanges:
    return TableChanges(table, tuple(slices), sum((slice.file.counts for slice in slices), ChangeCounts()))


def routed_views(target: Target, changes: TableChanges, known: Mapping[int, TableSchema]) -> dict[TableSchema, View]:
    """How to read each member's changes; `CopyAnew` if they are not of the members that the target was filled from."""
    schema = known.get(target.source_oid)
    if schema is None or schema.members is None:
        raise ConnectionLostError(f"the tables that are routed into {target.table} have changed since the catalog was last looked at")
    source, members = schema.members.source_column, {member.name: member for member in schema.members.schemas}
    views: dict[TableSchema, View] = {}
    for version in set(changes.schemas):
        member = members.get(version.name)
        if member is None or not is_same_shape(version, member):
            raise CopyAnew(f"{version.name}, which is routed into it, was altered, renamed or made anew")
        names = {name: name for name in version.column_names}
        views[version] = View(names, {source: pa.scalar(str(version.name), pa.string())}, source=source)
    return views
