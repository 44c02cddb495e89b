"""Targets that follow their source: for changes of another shape than the target's, what it has to become.

Most epochs bring nothing new, and nobody is asked. Where a shape is new, or the catalog was seen to have other columns than the target, it
is asked again, after the changes were captured: so it is never older than what they show.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import CHANGE_TYPE, XID, ChangeType
from penstock.errors import ConnectionLostError, SchemaChangedError, SpoolCorruptError
from penstock.pipeline.following.sightings import Look, Sightings, is_same_shape
from penstock.pipeline.routing import routed_views
from penstock.pipeline.schema_policy import SchemaPolicy, SchemaRule, plan_following
from penstock.position import Position
from penstock.postgres.attributes import CatalogShape
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.routed import is_routed
from penstock.schema import TableName, TableSchema
from penstock.sinks.alterations import tell_numbers
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.evolution import CopyAnew, Evolution, same_views
from penstock.sinks.origin import Origin
from penstock.sinks.views import View
from penstock.spool.range import FileSlice, SpoolRange
from penstock.transforms.transform import Transform, is_made_by

OTHER_TRANSFORM = "what is done to its columns and rows was changed"
MADE_ANEW = "it was dropped and made anew"
_XID_BITS = 0xFFFFFFFF
UNSURE = "columns went and others came, and nobody can tell which changes were made in between"


class Follower:
    """Used by the threads of an epoch, each for tables of its own; `notice` by the pipeline's main thread."""

    def __init__(self, rule_of: Callable[[TableName], SchemaRule], inspect: Callable[[CatalogTable], CatalogShape]) -> None:
        """`inspect` asks the catalog."""
        self._rule_of = rule_of
        self._inspect = inspect
        self._suspects: set[TableName] = set()
        self.routed: dict[int, TableSchema] = {}
        """Tables into which others go, as the catalog has had them, by their numbers."""
        self._sightings = Sightings()
        self._levels: dict[TableName, Position] = {}
        self._busy: dict[TableName, Position] = {}
        self._heaps: dict[tuple[TableName, int], str] = {}
        self._truncates: dict[TableName, frozenset[int]] = {}

    def notice(self, targets: Mapping[TableName, Target], look: Look) -> dict[TableName, str]:
        """Take in what the catalog has now. Gives the tables that have to be copied anew, though no change ever shows why."""
        anew: dict[TableName, str] = {}
        self.routed |= {schema.oid: schema for schema in look.schemas.values() if schema.members is not None}
        for name, target in targets.items():
            schema = look.schemas.get(name)
            if schema is None:
                if name in look.gone and look.seen_at is not None:
                    self._sightings.miss(name, look.gone[name], look.seen_at)
                continue
            reason = why_anew(schema, target, self._rule_of(name).transform) or look.moved.get(name)
            if reason is not None and self._rule_of(name).renews:
                anew[name] = reason
            elif target.origin is not None:
                self._compare(target, target.origin, schema, look.seen_at)
        return anew

    def _compare(self, target: Target, origin: Origin, schema: TableSchema, seen_at: Position | None) -> None:
        name = target.table
        if origin.has_all_of(schema):
            self._suspects.discard(name)
        else:
            self._suspects.add(name)
        if origin.is_same(schema) and schema.attributes is not None:
            # As long as nothing happened to the columns, nothing was written into the rows that they would not show.
            self._heaps[name, schema.oid] = schema.attributes.heap
        if seen_at is None or is_routed(target.source_oid) or self._rule_of(name).transform is not None:
            return
        if is_level(target, origin, schema):
            self._sightings.forget(name)
            self._levels[name] = seen_at
        else:
            self._sightings.see(name, schema, seen_at)

    def renews(self, name: TableName) -> bool:
        """Whether a target that cannot follow is copied anew by itself."""
        return self._rule_of(name).renews

    def truncates(self, name: TableName) -> Collection[int]:
        """The transactions that changes so far have shown to empty a table, 32 bits of each."""
        return self._truncates.get(name, frozenset())

    def gone(self, name: TableName, end: Position | None) -> str | None:
        """Why the source has a table no more, if an epoch that ends at `end` has all that there was of it; None: any epoch."""
        return self._sightings.gone(name, end)

    def ahead(self, target: Target, end: Position | None) -> TableSchema | None:
        """What the catalog has in the place of the target's shape, if an epoch that ends at `end` has all changes from before."""
        schema = self._sightings.shape(target.table, end)
        if schema is None or target.origin is None or schema.oid != target.source_oid:
            return None
        return None if is_level(target, target.origin, schema) else schema

    def renamed(
        self, live: Mapping[TableName, tuple[int, Position | None]], ranges: Mapping[Position, SpoolRange], end: Position
    ) -> dict[TableName, str]:
        """A table is its OID. Of those that are `live`, by OID and where they stand, the ones whose changes come under another name."""
        owners = {oid: (owner, applied) for owner, (oid, applied) in live.items()}
        found: dict[TableName, str] = {}
        for start, each in ranges.items():
            for name, oid in {(name, slice.file.oid) for name, table in each.tables.items() for slice in table.slices}:
                owner, applied = owners.get(oid, (name, None))
                if owner != name and applied == start and self.gone(owner, end) is None:
                    found[owner] = f"it was called {name}"
        return found

    def follow(self, sink: Sink, target: Target, changes: TableChanges, end: Position | None = None) -> TableChanges:
        """How `changes` are to be read, and what the target becomes with them. `CopyAnew`, or what the policy says to it.

        With `end`, where the epoch ends, the target also becomes what only the catalog has shown so far.
        """
        rule = self._rule_of(target.table)
        self._truncates[target.table] = self._truncates.get(target.table, frozenset()) | _truncating(changes)
        if is_routed(target.source_oid):
            return self._follow_members(rule, target, changes)
        versions = changes.schemas
        self._busy[target.table] = end if versions and end is not None else self._busy.get(target.table, Position.ZERO)
        if any(version.oid != target.source_oid for version in versions):
            raise _refused(rule, target, MADE_ANEW)
        if not is_made_by(target, rule.transform):
            raise _refused(rule, target, OTHER_TRANSFORM)
        if rule.transform is not None or target.origin is None:
            _check_same(rule, target, versions)
            return changes
        views = same_views(target.origin, target.key, versions)
        ahead = None if end is None else self.ahead(target, end)
        if views is not None and ahead is None and target.table not in self._suspects and not _is_altered(target, changes):
            return replace(changes, views=views)
        evolution = self._evolution(rule, target, changes, views, ahead)
        if evolution is None:
            return replace(changes, views=views or {})
        if not evolution.is_change and evolution.origin.columns == target.origin.columns:
            if ahead is not None:
                self._sightings.forget(target.table)
            return replace(changes, views=evolution.views)
        if not sink.can_evolve(target, evolution):
            raise _refused(rule, target, "its target cannot be altered in place")
        return replace(changes, views=evolution.views, evolution=evolution)

    def follow_plain(self, target: Target, changes: TableChanges) -> TableChanges | None:
        """The same for changes that show nothing new, without a look at the catalog; None if they may. For a shadow, in any thread."""
        rule = self._rule_of(target.table)
        is_told = target.table in self._suspects or _is_altered(target, changes) or not is_made_by(target, rule.transform)
        if is_told or changes.counts.truncates or not all(self.is_followed(target, slice) for slice in changes.slices):
            return None
        if is_routed(target.source_oid):
            return self._follow_members(rule, target, changes)
        if rule.transform is not None or target.origin is None:
            return changes
        views = same_views(target.origin, target.key, changes.schemas)
        return None if views is None else replace(changes, views=views)

    def _evolution(
        self,
        rule: SchemaRule,
        target: Target,
        changes: TableChanges,
        views: Mapping[TableSchema, View] | None,
        ahead: TableSchema | None,
    ) -> Evolution | None:
        """What the target becomes by what the catalog has now; None: nothing, since `views` are right as they are."""
        origin = target.origin
        assert origin is not None
        shape = self._inspect(CatalogTable(target.source_oid, target.table))
        _check_shown(shape, [slice for slice in changes.slices if views is None or slice.file.schema not in views])
        if ahead is not None and not self._may_become(rule, target, ahead, shape, is_idle=not changes.slices):
            ahead = None
        if ahead is None and views is not None and (not changes.slices or origin.has_all_of(shape.schema)):
            return None
        heap = self._heaps.get((target.table, target.source_oid), origin.heap)
        return self._planned(rule, replace(target, origin=replace(origin, heap=heap)), changes, shape, ends=ahead is not None)

    def _follow_members(self, rule: SchemaRule, target: Target, changes: TableChanges) -> TableChanges:
        try:
            return replace(changes, views=routed_views(target, changes, self.routed))
        except CopyAnew as reason:
            raise _refused(rule, target, str(reason)) from reason

    def is_followed(self, target: Target, slice: FileSlice) -> bool:
        """Whether changes that were captured long ago have the shape that the target has."""
        schema, rule = slice.file.schema, self._rule_of(target.table)
        try:
            if is_routed(target.source_oid):
                routed_views(target, TableChanges(target.table, (slice,), slice.file.counts), self.routed)
                return True
            if rule.transform is not None or target.origin is None:
                _check_same(rule, target, [schema])
                return schema.oid == target.source_oid
        except (CopyAnew, SchemaChangedError):
            return False
        return schema.oid == target.source_oid and same_views(target.origin, target.key, [schema]) is not None

    def _may_become(self, rule: SchemaRule, target: Target, seen: TableSchema, shape: CatalogShape, *, is_idle: bool) -> bool:
        """Whether what was seen is still so. If the table was altered since, there may be changes to come that were made before that.

        Where there are changes, it is for them to show what they can.
        """
        if not is_same_shape(seen, shape.schema):
            self._sightings.forget(target.table)
            return False
        is_sure = target.origin is not None and self._was_level(target.table, target.origin, seen)
        if is_idle and not is_sure:
            raise _refused(rule, target, UNSURE)
        return is_sure

    def _was_level(self, name: TableName, origin: Origin, schema: TableSchema) -> bool:
        """Whether all that was applied so far had the target's columns, though it may look as if.

        A column that is dropped and made again shows in no change: if nothing was seen to be level since the last one, and columns both
        went and came, it may have been applied as what it was not.
        """
        numbers = set(schema.attributes.numbers if schema.attributes is not None else ())
        if numbers >= origin.columns.keys() or numbers <= origin.columns.keys():
            return True
        return name in self._levels and self._busy.get(name, Position.ZERO) <= self._levels[name]

    @staticmethod
    def _planned(rule: SchemaRule, target: Target, changes: TableChanges, shape: CatalogShape, *, ends: bool) -> Evolution:
        origin = target.origin
        assert origin is not None
        mine = [each for each in changes.alterations if each.concerns(target.source_oid)]
        names = {number: column.name for number, column in origin.columns.items()}
        told = tell_numbers(changes.slices, mine, names) if mine else ()
        try:
            return plan_following(rule.policy, target, origin, changes.schemas, shape, ends=ends, told=told)
        except CopyAnew as reason:
            raise _refused(rule, target, str(reason)) from reason


def is_level(target: Target, origin: Origin, schema: TableSchema) -> bool:
    """Whether the target has just what the catalog has in `schema`."""
    names = {column.name: column.target for column in origin.columns.values()}
    return origin.is_same(schema) and tuple(names.get(name) for name in schema.key) == target.key


def why_anew(schema: TableSchema, target: Target, transform: Transform | None = None) -> str | None:
    """Why a target is no copy of the table that the catalog has now, though the log may never show it."""
    if schema.oid != target.source_oid:
        return MADE_ANEW if schema.members is None else "the tables that are routed into it came, went or changed"
    if not is_made_by(target, transform):
        return OTHER_TRANSFORM
    origin = target.origin
    if origin is not None and origin.is_shape_of(schema) and not origin.is_same(schema):
        return "a column was dropped and made again with the same name"
    return None


def _check_same(rule: SchemaRule, target: Target, versions: Sequence[TableSchema]) -> None:
    """Raise unless changes of these shapes are of the very columns that the target has, or that its own were made of."""
    seen = [version if rule.transform is None else rule.transform.schema(version) for version in versions]
    if target.origin is None:
        if not all(_is_plain(target, version) for version in seen):
            raise _refused(rule, target, "it changed, and nobody wrote down which of its columns was which")
    elif not all(target.origin.is_shape_of(version) for version in versions) or any(version.key != target.key for version in seen):
        raise _refused(rule, target, "it changed its columns or its key, and they are transformed")


def _is_altered(target: Target, changes: TableChanges) -> bool:
    """Whether it was told that the table has other columns than the target, though changes may look as if."""
    told = [each for each in changes.alterations if each.concerns(target.source_oid)]
    return target.origin is not None and any(not target.origin.columns.keys() <= each.columns.keys() for each in told)


def _is_plain(target: Target, version: TableSchema) -> bool:
    found = {column.name: column.arrow_type for column in version.columns}
    return version.key == target.key and found == {field.name: field.type for field in target.schema}


def _refused(rule: SchemaRule, target: Target, reason: str) -> Exception:
    if rule.renews:
        return CopyAnew(reason)
    is_told = rule.policy is not SchemaPolicy.EVOLVE
    why = f"schema_changes is {rule.policy}" if is_told else "a new copy would have nothing of what it holds besides the rows of now"
    return SchemaChangedError(
        f"table {target.table} cannot be followed: {reason}, and {why}",
        hint=f"penstock tables resync {target.table} copies it as it is now",
    )


def _check_shown(shape: CatalogShape, slices: Iterable[FileSlice]) -> None:
    """A transaction may alter a table and write to it, and be in the log before anybody sees it: while it waits for a standby, say."""
    for slice in slices:
        if not all(shape.shows(xid) for xid in _xids(slice)):
            raise ConnectionLostError(f"the catalog does not show yet what the log shows of {slice.file.table}")


def _xids(slice: FileSlice) -> list[int]:
    if slice.file.xid is not None:
        return [slice.file.xid]
    return [xid for xid in pc.unique(_read(slice, XID).column(XID)).to_pylist() if xid is not None]


def _truncating(changes: TableChanges) -> set[int]:
    """The transactions that emptied the table; also subtransactions, where these stand in the rows: the catalog has them too."""
    found: set[int | None] = set()
    for slice in changes.slices:
        if slice.file.counts.truncates:
            rows = _read(slice, CHANGE_TYPE, XID)
            found |= {slice.file.xid, *rows.filter(pc.equal(rows.column(CHANGE_TYPE), ChangeType.TRUNCATE.value)).column(XID).to_pylist()}
    return {xid & _XID_BITS for xid in found if xid is not None}


def _read(slice: FileSlice, *columns: str) -> pa.Table:
    try:
        return pq.read_table(slice.path, columns=list(columns))
    except OSError as error:
        raise SpoolCorruptError(f"{slice.path} cannot be read", hint="restore the file, or delete the spool") from error
