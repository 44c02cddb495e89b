"""Track schema changes: compare the schemas of changes and catalog with the target's schema, and plan the
target's next schema.

An epoch may apply a schema from the catalog only if the epoch ends at or after the position that
`SourceAdapter.seen` returned when the catalog was read. Such an epoch has every change made before that, so
no later epoch has changes of an older schema.

Most epochs have no schema change and do not query the catalog. An epoch queries it if a change has a new
schema, or if the catalog last showed other columns than the target has. The query runs after the changes were
captured, so its result is never older than the changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import CHANGE_TYPE, XID, ChangeType
from penstock.config.policies import SchemaPolicy, SchemaRule, plan_following
from penstock.errors import ConnectionLostError, SchemaChangedError, SpoolCorruptError
from penstock.pipeline.routing import routed_views
from penstock.position import Position
from penstock.postgres.catalog import CatalogShape, CatalogTable
from penstock.postgres.types.registry import BUILTIN_TYPES
from penstock.postgres.types.scalars import declared_decimal
from penstock.schema import Members, TableName, TableSchema, is_routed, joined_schema
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.evolution import Evolution, ResyncRequired, has_types, same_views
from penstock.sinks.lineage import Origin, resolve_attnums
from penstock.sinks.row_values import View
from penstock.spool.reader import FileSlice, SpoolRange
from penstock.transforms.transform import Transform, is_made_by


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """The result of one catalog query: the schemas of the tables, and a position at or after all changes made
    before the query (`seen_at`). `gone` has the dropped tables, and `moved` has the tables whose rows changed
    without WAL records, each with the reason.
    """

    schemas: Mapping[TableName, TableSchema]
    seen_at: Position | None = None
    gone: Mapping[TableName, str] = field(default_factory=dict)
    moved: Mapping[TableName, str] = field(default_factory=dict)


@dataclass(slots=True)
class CatalogObservations:
    """The schemas in the catalog that differ from those of the targets, and the dropped tables. Each is
    stored with a position: only an epoch that ends at this position or later may apply it. The pipeline's
    main thread writes the observations, epochs read them.
    """

    _shapes: dict[TableName, tuple[Position, TableSchema]] = field(default_factory=dict)
    _gone: dict[TableName, tuple[Position, str]] = field(default_factory=dict)

    def see(self, name: TableName, schema: TableSchema, at: Position) -> None:
        self._gone.pop(name, None)
        known = self._shapes.get(name)
        if known is None or not is_same_shape(known[1], schema):
            self._shapes[name] = (at, schema)

    def miss(self, name: TableName, reason: str, at: Position) -> None:
        self._shapes.pop(name, None)
        self._gone.setdefault(name, (at, reason))

    def forget(self, name: TableName) -> None:
        self._shapes.pop(name, None)
        self._gone.pop(name, None)

    def shape(self, name: TableName, end: Position | None) -> TableSchema | None:
        """Return the catalog's schema if an epoch that ends at `end` may apply it; otherwise None. With `end`
        None, any observed schema is returned.
        """
        at, schema = self._shapes.get(name, (None, None))
        return schema if at is not None and (end is None or at <= end) else None

    def gone(self, name: TableName, end: Position | None) -> str | None:
        """Return the reason why the table no longer exists if an epoch that ends at `end` may apply the drop;
        otherwise None. With `end` None, the reason of any observed drop is returned.
        """
        at, reason = self._gone.get(name, (None, None))
        return reason if at is not None and (end is None or at <= end) else None


def is_same_shape(one: TableSchema, other: TableSchema) -> bool:
    """Whether both schemas have the same columns, with the same names, types and attribute numbers."""
    return one == other and _numbers(one) == _numbers(other)


def _numbers(schema: TableSchema) -> object:
    return None if schema.attributes is None else (schema.attributes.numbers, schema.attributes.width)


_NUMERIC = BUILTIN_TYPES["numeric"][0]
OTHER_TRANSFORM = "its transform was changed"
RETYPED = "`types:` in the configuration was changed"
RECREATED = "it was dropped and recreated"
_XID_BITS = 0xFFFFFFFF
UNSURE = "columns were dropped and added, and the WAL does not show which columns earlier changes had"


class SchemaTracker:
    """Plans how targets follow schema changes. The worker threads of an epoch use it, one thread per table.
    The pipeline's main thread calls `observe_catalog`.
    """

    def __init__(
        self, rule_of: Callable[[TableName], SchemaRule], inspect: Callable[[CatalogTable], CatalogShape]
    ) -> None:
        """`inspect` queries the catalog for the current schema of one table."""
        self._rule_of = rule_of
        self._inspect = inspect
        self._suspects: set[TableName] = set()
        self.routed: dict[int, TableSchema] = {}
        """Routed tables as the catalog last showed them, by OID."""
        self._observations = CatalogObservations()
        self._matched_at: dict[TableName, Position] = {}
        self._busy: dict[TableName, Position] = {}
        self._heaps: dict[tuple[TableName, int], str] = {}
        self._truncates: dict[TableName, frozenset[int]] = {}

    def observe_catalog(
        self, targets: Mapping[TableName, Target], snapshot: CatalogSnapshot
    ) -> dict[TableName, str]:
        """Store the result of a catalog query. Returns the tables that must be resynced for reasons that
        their changes do not show, each with the reason.
        """
        resyncs: dict[TableName, str] = {}
        self.routed |= {
            schema.oid: schema for schema in snapshot.schemas.values() if schema.members is not None
        }
        for name, target in targets.items():
            schema = snapshot.schemas.get(name)
            if schema is None:
                if name in snapshot.gone and snapshot.seen_at is not None:
                    self._observations.miss(name, snapshot.gone[name], snapshot.seen_at)
                continue
            reason = find_resync_reason(schema, target, self._rule_of(name).transform) or snapshot.moved.get(
                name
            )
            if reason is not None and self._rule_of(name).auto_resync:
                resyncs[name] = reason
            elif target.origin is not None:
                self._compare(target, target.origin, schema, snapshot.seen_at)
        return resyncs

    def _compare(self, target: Target, origin: Origin, schema: TableSchema, seen_at: Position | None) -> None:
        name = target.table
        if origin.has_all_of(schema):
            self._suspects.discard(name)
        else:
            self._suspects.add(name)
        if origin.is_same(schema) and schema.attributes is not None:
            # As long as the columns do not change, every row in this heap was written with them.
            self._heaps[name, schema.oid] = schema.attributes.heap
        if seen_at is None or is_routed(target.source_oid) or self._rule_of(name).transform is not None:
            return
        if matches_catalog(target, origin, schema):
            self._observations.forget(name)
            self._matched_at[name] = seen_at
        else:
            self._observations.see(name, schema, seen_at)

    def auto_resync(self, name: TableName) -> bool:
        """Whether a target that cannot be altered is resynced automatically."""
        return self._rule_of(name).auto_resync

    def truncates(self, name: TableName) -> Collection[int]:
        """The ids (low 32 bits) of the transactions with a TRUNCATE of the table, in the changes processed so
        far.
        """
        return self._truncates.get(name, frozenset())

    def gone(self, name: TableName, end: Position | None) -> str | None:
        """Return the reason why the table no longer exists if an epoch that ends at `end` has its last
        change; otherwise None. With `end` None, the reason of any observed drop is returned.
        """
        return self._observations.gone(name, end)

    def ahead(self, target: Target, end: Position | None) -> TableSchema | None:
        """Return the schema from the catalog if it differs from the target's, and if an epoch that ends at
        `end` has all changes made before this schema was observed; otherwise None. With `end` None, it does
        not matter when the schema was observed.
        """
        schema = self._observations.shape(target.table, end)
        if schema is None or target.origin is None or schema.oid != target.source_oid:
            return None
        return None if matches_catalog(target, target.origin, schema) else schema

    def renamed(
        self,
        live: Mapping[TableName, tuple[int, Position | None]],
        ranges: Mapping[Position, SpoolRange],
        end: Position,
    ) -> dict[TableName, str]:
        """Return the live tables whose changes arrive under another name, each with the reason. `live` has
        the OID and the applied position of each live table. `ranges` has the changes after each applied
        position.
        """
        owners = {oid: (owner, applied) for owner, (oid, applied) in live.items()}
        found: dict[TableName, str] = {}
        for start, each in ranges.items():
            for name, oid in {
                (name, slice.file.oid) for name, table in each.tables.items() for slice in table.slices
            }:
                owner, applied = owners.get(oid, (name, None))
                if owner != name and applied == start and self.gone(owner, end) is None:
                    found[owner] = f"it was called {name}"
        return found

    def follow(
        self, sink: Sink, target: Target, changes: TableChanges, end: Position | None = None
    ) -> TableChanges:
        """Return `changes` with the mapping of their columns to the target, and with `evolution` if the
        target's schema changes. If the target cannot be altered, raises `ResyncRequired`, or
        `SchemaChangedError` if the table is not resynced automatically.

        `end` is the end of the epoch. If it is given, schema changes that only the catalog shows are
        included.
        """
        rule = self._rule_of(target.table)
        self._truncates[target.table] = self._truncates.get(target.table, frozenset()) | _truncating(changes)
        if is_routed(target.source_oid):
            return self._follow_members(rule, target, changes)
        versions = changes.schemas
        self._busy[target.table] = (
            end if versions and end is not None else self._busy.get(target.table, Position.ZERO)
        )
        if any(version.oid != target.source_oid for version in versions):
            raise _refused(rule, target, RECREATED)
        if not is_made_by(target, rule.transform):
            raise _refused(rule, target, OTHER_TRANSFORM)
        if rule.transform is not None or target.origin is None:
            _check_same(rule, target, versions)
            return changes
        views = same_views(target.schema, target.key, target.origin, versions)
        ahead = None if end is None else self.ahead(target, end)
        if (
            views is not None
            and ahead is None
            and target.table not in self._suspects
            and not _is_altered(target, changes)
        ):
            return replace(changes, views=views)
        evolution = self._evolution(rule, target, changes, views, ahead)
        if evolution is None:
            return replace(changes, views=views or {})
        if not evolution.is_change and evolution.origin.columns == target.origin.columns:
            if ahead is not None:
                self._observations.forget(target.table)
            return replace(changes, views=evolution.views)
        if not sink.can_evolve(target, evolution):
            raise _refused(rule, target, "its target cannot be altered in place")
        return replace(changes, views=evolution.views, evolution=evolution)

    def follow_plain(self, target: Target, changes: TableChanges) -> TableChanges | None:
        """Do what `follow` does, without a catalog query, for changes without a schema change. Returns None
        if the changes may include a schema change or a TRUNCATE. Resyncs call this from any thread.
        """
        rule = self._rule_of(target.table)
        may_differ = (
            target.table in self._suspects
            or _is_altered(target, changes)
            or not is_made_by(target, rule.transform)
        )
        if (
            may_differ
            or changes.counts.truncates
            or not all(self.is_followed(target, slice) for slice in changes.slices)
        ):
            return None
        if is_routed(target.source_oid):
            return self._follow_members(rule, target, changes)
        if rule.transform is not None or target.origin is None:
            return changes
        views = same_views(target.schema, target.key, target.origin, changes.schemas)
        return None if views is None else replace(changes, views=views)

    def _evolution(
        self,
        rule: SchemaRule,
        target: Target,
        changes: TableChanges,
        views: Mapping[TableSchema, View] | None,
        ahead: TableSchema | None,
    ) -> Evolution | None:
        """Plan the change of the target's schema from the current catalog. Returns None if the target keeps
        its schema and `views` is correct.
        """
        origin = target.origin
        assert origin is not None
        shape = self._inspect(CatalogTable(target.source_oid, target.table))
        _check_shown(
            shape, [slice for slice in changes.slices if views is None or slice.file.schema not in views]
        )
        if ahead is not None and not self._is_current(rule, target, ahead, shape, is_idle=not changes.slices):
            ahead = None
        if ahead is None and views is not None and (not changes.slices or origin.has_all_of(shape.schema)):
            return None
        heap = self._heaps.get((target.table, target.source_oid), origin.heap)
        return self._plan_evolution(
            rule, replace(target, origin=replace(origin, heap=heap)), changes, shape, ends=ahead is not None
        )

    def _follow_members(self, rule: SchemaRule, target: Target, changes: TableChanges) -> TableChanges:
        try:
            return replace(changes, views=routed_views(target, changes, self.routed))
        except ResyncRequired as reason:
            raise _refused(rule, target, str(reason)) from reason

    def is_followed(self, target: Target, slice: FileSlice) -> bool:
        """Whether the changes of a spooled slice have the schema from which the target was filled."""
        schema, rule = slice.file.schema, self._rule_of(target.table)
        try:
            if is_routed(target.source_oid):
                routed_views(target, TableChanges(target.table, (slice,), slice.file.counts), self.routed)
                return True
            if rule.transform is not None or target.origin is None:
                _check_same(rule, target, [schema])
                return schema.oid == target.source_oid
        except (ResyncRequired, SchemaChangedError):
            return False
        views = same_views(target.schema, target.key, target.origin, [schema])
        return schema.oid == target.source_oid and views is not None

    def _is_current(
        self, rule: SchemaRule, target: Target, seen: TableSchema, shape: CatalogShape, *, is_idle: bool
    ) -> bool:
        """Whether the epoch may apply `seen`, the schema that the catalog showed at an earlier position.

        The epoch must not apply `seen` if the current schema (`shape`) differs from it: the table was altered
        again, and later epochs may still have changes with `seen`. The epoch must not apply `seen` either if
        the columns of earlier changes are uncertain (`_always_matched`). In that case the epoch's own changes
        determine the schema, and an epoch without changes (`is_idle`) raises an error.
        """
        if not is_same_shape(seen, shape.schema):
            self._observations.forget(target.table)
            return False
        is_sure = target.origin is not None and self._always_matched(target.table, target.origin, seen)
        if is_idle and not is_sure:
            raise _refused(rule, target, UNSURE)
        return is_sure

    def _always_matched(self, name: TableName, origin: Origin, schema: TableSchema) -> bool:
        """Whether all changes applied so far certainly had the target's columns.

        Changes do not show that a column was dropped and created again under its name. If the table has lost
        and gained columns since the catalog was last seen to match the target, changes applied since then may
        have been written to the wrong column.
        """
        numbers = set(schema.attributes.numbers if schema.attributes is not None else ())
        if numbers >= origin.columns.keys() or numbers <= origin.columns.keys():
            return True
        return name in self._matched_at and self._busy.get(name, Position.ZERO) <= self._matched_at[name]

    @staticmethod
    def _plan_evolution(
        rule: SchemaRule, target: Target, changes: TableChanges, shape: CatalogShape, *, ends: bool
    ) -> Evolution:
        origin = target.origin
        assert origin is not None
        mine = [each for each in changes.alterations if each.concerns(target.source_oid)]
        names = {number: column.name for number, column in origin.columns.items()}
        reported = resolve_attnums(changes.slices, mine, names) if mine else ()
        try:
            return plan_following(
                rule.policy, target, origin, changes.schemas, shape, ends=ends, reported=reported
            )
        except ResyncRequired as reason:
            raise _refused(rule, target, str(reason)) from reason


def matches_catalog(target: Target, origin: Origin, schema: TableSchema) -> bool:
    """Whether the target has exactly the columns of the catalog's `schema`, with the same types."""
    names = {column.name: column.target for column in origin.columns.values()}
    return (
        origin.is_same(schema)
        and tuple(names.get(name) for name in schema.key) == target.key
        and has_types(target.schema, origin, schema)
    )


def find_resync_reason(schema: TableSchema, target: Target, transform: Transform | None = None) -> str | None:
    """Return the reason why a target must be resynced, found by comparing it with the catalog; None if there
    is no reason. The table or a column was recreated under its name, or the configuration was changed: the
    WAL may show none of these.
    """
    if schema.oid != target.source_oid:
        return RECREATED if schema.members is None else "the tables routed into it changed"
    if not is_made_by(target, transform):
        return OTHER_TRANSFORM
    if is_retyped(schema, target, transform):
        return RETYPED
    origin = target.origin
    if origin is not None and origin.is_shape_of(schema) and not origin.is_same(schema):
        return "a column was dropped and recreated with the same name"
    return None


def is_retyped(schema: TableSchema, target: Target, transform: Transform | None = None) -> bool:
    """Whether source columns that were not altered are now read with other Arrow types than when the target
    was filled. `schema` is that of the source table, before `transform`.
    """
    if schema.members is not None:
        is_same = schema.oid == target.source_oid
        return not is_same and _oid_as_held(schema, schema.members, target) == target.source_oid
    origin = target.origin
    if origin is None:
        return transform is None and schema.oid == target.source_oid and _has_other_numbers(schema, target)
    if not origin.is_shape_of(schema):
        return False
    if not origin.made_by:
        return not has_types(target.schema, origin, schema)
    if origin.read_as:
        return not origin.is_read_as(schema)
    return transform is not None and not _has_columns(target, transform.schema(schema))


def _oid_as_held(schema: TableSchema, members: Members, target: Target) -> int:
    """Return the OID that the routed table would have if its members had the types of the target."""
    held = {field.name: field.type for field in target.schema}
    retyped = [
        replace(
            member,
            columns=tuple(
                replace(column, arrow_type=held.get(column.name, column.arrow_type))
                for column in member.columns
            ),
        )
        for member in members.schemas
    ]
    return joined_schema(schema.name, members.source_column, retyped).oid


def _has_other_numbers(schema: TableSchema, target: Target) -> bool:
    """Whether the target has another type for a column whose type `types.numeric` decides."""
    held = {field.name: field.type for field in target.schema}
    return any(
        column.type_oid == _NUMERIC
        and declared_decimal(column.type_modifier) is None
        and held.get(column.name, column.arrow_type) != column.arrow_type
        for column in schema.columns
    )


def _check_same(rule: SchemaRule, target: Target, versions: Sequence[TableSchema]) -> None:
    """Raise an error unless these schemas have the columns of the target, or of the table from which it was
    filled.
    """
    seen = [version if rule.transform is None else rule.transform.schema(version) for version in versions]
    if target.origin is None:
        if not all(_is_plain(target, version) for version in seen):
            raise _refused(rule, target, "it changed, and its target has no record of column numbers")
    elif any(is_retyped(version, target, rule.transform) for version in versions):
        raise _refused(rule, target, RETYPED)
    elif not all(target.origin.is_shape_of(version) for version in versions) or not all(
        _has_columns(target, version) for version in seen
    ):
        raise _refused(rule, target, "its columns or its key changed, and a transform uses them")


def _is_altered(target: Target, changes: TableChanges) -> bool:
    """Whether the DDL trigger reported columns that the target lacks."""
    reported = [each for each in changes.alterations if each.concerns(target.source_oid)]
    return target.origin is not None and any(
        not target.origin.columns.keys() <= each.columns.keys() for each in reported
    )


def _is_plain(target: Target, version: TableSchema) -> bool:
    found = {column.name: column.arrow_type for column in version.columns}
    return version.key == target.key and found == {field.name: field.type for field in target.schema}


def _has_columns(target: Target, version: TableSchema) -> bool:
    """Whether the target has the key and all columns of `version`. It may have columns of other writers."""
    found = {field.name: field.type for field in target.schema}
    return version.key == target.key and all(
        found.get(column.name) == column.arrow_type for column in version.columns
    )


def _refused(rule: SchemaRule, target: Target, reason: str) -> Exception:
    if rule.auto_resync:
        return ResyncRequired(reason)
    is_configured = rule.policy is not SchemaPolicy.EVOLVE
    why = (
        f"schema_changes is {rule.policy}"
        if is_configured
        else "a resync would lose everything except the current rows"
    )
    return SchemaChangedError(
        f"table {target.table} was changed and its target cannot be altered: {reason}, and {why}",
        hint=f"penstock tables resync CONFIG {target.table} copies it with its current schema",
    )


def _check_shown(shape: CatalogShape, slices: Iterable[FileSlice]) -> None:
    """Raise an error if a change is in the WAL, and the catalog does not show its transaction yet. This is
    possible while the commit waits for a synchronous standby.
    """
    for slice in slices:
        if not all(shape.shows(xid) for xid in _xids(slice)):
            raise ConnectionLostError(
                f"the catalog does not yet show a change of {slice.file.table} that is in the WAL"
            )


def _xids(slice: FileSlice) -> list[int]:
    if slice.file.xid is not None:
        return [slice.file.xid]
    return [xid for xid in pc.unique(_read(slice, XID).column(XID)).to_pylist() if xid is not None]


def _truncating(changes: TableChanges) -> set[int]:
    """Return the ids (low 32 bits) of the transactions and subtransactions that truncated the table. The
    catalog row of the table has the id of one of them.
    """
    found: set[int | None] = set()
    for slice in changes.slices:
        if slice.file.counts.truncates:
            rows = _read(slice, CHANGE_TYPE, XID)
            found |= {
                slice.file.xid,
                *rows.filter(pc.equal(rows.column(CHANGE_TYPE), ChangeType.TRUNCATE.value))
                .column(XID)
                .to_pylist(),
            }
    return {xid & _XID_BITS for xid in found if xid is not None}


def _read(slice: FileSlice, *columns: str) -> pa.Table:
    try:
        return pq.read_table(slice.path, columns=list(columns))
    except OSError as error:
        raise SpoolCorruptError(
            f"{slice.path} cannot be read", hint="restore the file, or delete the spool"
        ) from error
