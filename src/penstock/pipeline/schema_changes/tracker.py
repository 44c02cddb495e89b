"""Track schema changes: compare the schemas of changes and catalog with the target's schema, and plan the
target's next schema.

A catalog state is valid for an epoch only if the epoch ends at or after the position that
`SourceAdapter.seen` returned with it: such an epoch has every change made before the state was read, so no
later epoch has changes of an older schema.

Most epochs have no schema change and do not query the catalog. It is queried again if a change has a new
schema, or if the catalog last showed other columns than the target has. This query runs after the changes
were captured, so its result is never older than the changes.
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
from penstock.schema import TableName, TableSchema, is_routed
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.evolution import Evolution, ResyncRequired, has_types, same_views
from penstock.sinks.lineage import Origin, resolve_attnums
from penstock.sinks.row_values import View
from penstock.spool.reader import FileSlice, SpoolRange
from penstock.transforms.transform import Transform, is_made_by


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """Result of one catalog query: table schemas, a position at or after all earlier changes (`seen_at`),
    dropped tables (`gone`), and tables whose rows changed without WAL records (`moved`), each with the
    reason.
    """

    schemas: Mapping[TableName, TableSchema]
    seen_at: Position | None = None
    gone: Mapping[TableName, str] = field(default_factory=dict)
    moved: Mapping[TableName, str] = field(default_factory=dict)


@dataclass(slots=True)
class CatalogObservations:
    """Catalog schemas that differ from the target's, and dropped tables, each with the position from which an
    epoch may apply it. The pipeline's main thread writes them, epochs read them.
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
        """The catalog's schema, if an epoch that ends at `end` may apply it. `end` None: any epoch."""
        at, schema = self._shapes.get(name, (None, None))
        return schema if at is not None and (end is None or at <= end) else None

    def gone(self, name: TableName, end: Position | None) -> str | None:
        """The reason why the table no longer exists, if an epoch that ends at `end` may apply the drop."""
        at, reason = self._gone.get(name, (None, None))
        return reason if at is not None and (end is None or at <= end) else None


def is_same_shape(one: TableSchema, other: TableSchema) -> bool:
    """Whether both have the same columns with the same names, types and attribute numbers."""
    return one == other and _numbers(one) == _numbers(other)


def _numbers(schema: TableSchema) -> object:
    return None if schema.attributes is None else (schema.attributes.numbers, schema.attributes.width)


OTHER_TRANSFORM = "its transform was changed"
RECREATED = "it was dropped and recreated"
_XID_BITS = 0xFFFFFFFF
UNSURE = "columns were dropped and added, and the WAL does not show which columns earlier changes had"


class SchemaTracker:
    """Used by the worker threads of an epoch, one thread per table; `observe_catalog` by the pipeline's main
    thread.
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
        """Store a catalog state. Returns the tables that must be resynced for a reason that their changes do
        not show, with the reason.
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
        """The reason why the table no longer exists, if an epoch that ends at `end` has its last change. With
        `end` None: if any epoch has.
        """
        return self._observations.gone(name, end)

    def ahead(self, target: Target, end: Position | None) -> TableSchema | None:
        """The schema from the catalog, if it differs from the target's and was observed at or before `end`,
        so that an epoch that ends at `end` has all earlier changes. Otherwise None. With `end` None: whenever
        it was observed.
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
        """Live tables whose changes arrive under another name, with the reason. Tables are identified by OID.
        `live` has the OID and the applied position of each; `ranges` has the changes by start position.
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
        target's schema changes. Raises `ResyncRequired`, or the error that the policy prescribes.

        With `end`, the end of the epoch, schema changes that only the catalog shows are included.
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
        """Same as `follow`, but without catalog queries, for changes without a schema change. Returns None if
        a schema change or a TRUNCATE is possible. Resyncs use it, from any thread.
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
        """The change of the target's schema, planned from the current catalog; None if the target keeps its
        schema and `views` is correct.
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

        Not if the current schema (`shape`) differs: the table was altered again, and later epochs may still
        have changes with `seen`. Not if the columns of earlier changes are uncertain (`_always_matched`):
        then the epoch's own changes give the schema, and an epoch without changes (`is_idle`) raises an
        error.
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

        Changes do not show that a column was dropped and created again under its name. If columns were both
        dropped and added after the target last had the catalog's columns, a change may have been applied to
        the wrong column.
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
    """The reason why a target must be resynced, found by comparing it with the catalog; None if there is no
    reason. The table or a column was recreated under its name, or the transform was changed: the WAL may show
    none of these.
    """
    if schema.oid != target.source_oid:
        return RECREATED if schema.members is None else "the tables routed into it changed"
    if not is_made_by(target, transform):
        return OTHER_TRANSFORM
    origin = target.origin
    if origin is not None and origin.is_shape_of(schema) and not origin.is_same(schema):
        return "a column was dropped and recreated with the same name"
    return None


def _check_same(rule: SchemaRule, target: Target, versions: Sequence[TableSchema]) -> None:
    """Raise an error unless these schemas have the columns of the target, or of the table that it was filled
    from.
    """
    seen = [version if rule.transform is None else rule.transform.schema(version) for version in versions]
    if target.origin is None:
        if not all(_is_plain(target, version) for version in seen):
            raise _refused(rule, target, "it changed, and its target has no record of column numbers")
    elif not all(target.origin.is_shape_of(version) for version in versions) or not all(
        _is_plain(target, version) for version in seen
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
    """Raise an error while the catalog does not show a transaction that is in the WAL, for example because it
    waits for a synchronous standby.
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
    """The ids (low 32 bits) of the transactions and subtransactions that truncated the table: the catalog row
    has the id of one or the other.
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
