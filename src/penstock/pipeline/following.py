"""Targets that follow their source: for changes of another shape than the target's, what it has to become.

Most epochs bring nothing new, and nobody is asked. Where a shape is new, or the catalog was seen to have other columns than the target, it
is asked again, after the changes were captured: so it is never older than what they show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import XID
from penstock.errors import ConnectionLostError, SchemaChangedError, SpoolCorruptError
from penstock.pipeline.routing import routed_views
from penstock.pipeline.schema_policy import SchemaPolicy, SchemaRule, plan_following
from penstock.postgres.attributes import CatalogShape
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.routed import is_routed
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.evolution import CopyAnew, same_views
from penstock.sinks.origin import Origin
from penstock.spool.range import FileSlice
from penstock.transforms.transform import Transform, is_made_by

OTHER_TRANSFORM = "what is done to its columns and rows was changed"
MADE_ANEW = "it was dropped and made anew"


class Follower:
    """Used by the threads of an epoch, each for tables of its own; `notice` by the pipeline's main thread."""

    def __init__(self, rule_of: Callable[[TableName], SchemaRule], inspect: Callable[[CatalogTable], CatalogShape]) -> None:
        """`inspect` asks the catalog."""
        self._rule_of = rule_of
        self._inspect = inspect
        self._suspects: set[TableName] = set()
        self.routed: dict[int, TableSchema] = {}
        """Tables into which others go, as the catalog has had them, by their numbers."""
        self._heaps: dict[tuple[TableName, int], str] = {}

    def notice(self, targets: Mapping[TableName, Target], schemas: Mapping[TableName, TableSchema]) -> dict[TableName, str]:
        """Take in what the catalog has now. Gives the tables that have to be copied anew, though no change ever shows why."""
        anew: dict[TableName, str] = {}
        self.routed |= {schema.oid: schema for schema in schemas.values() if schema.members is not None}
        for name, target in targets.items():
            schema = schemas.get(name)
            if schema is None:
                continue
            reason = why_anew(schema, target, self._rule_of(name).transform)
            if reason is not None and self._rule_of(name).renews:
                anew[name] = reason
            elif target.origin is not None:
                self._compare(name, schema, target.origin)
        return anew

    def _compare(self, name: TableName, schema: TableSchema, origin: Origin) -> None:
        if origin.has_all_of(schema):
            self._suspects.discard(name)
        else:
            self._suspects.add(name)
        if origin.is_same(schema) and schema.attributes is not None:
            # As long as nothing happened to the columns, nothing was written into the rows that they would not show.
            self._heaps[name, schema.oid] = schema.attributes.heap

    def follow(self, sink: Sink, target: Target, changes: TableChanges) -> TableChanges:
        """How `changes` are to be read, and what the target becomes with them. `CopyAnew`, or what the policy says to it."""
        rule = self._rule_of(target.table)
        if is_routed(target.source_oid):
            return self._follow_members(rule, target, changes)
        versions = changes.schemas
        if any(version.oid != target.source_oid for version in versions):
            raise _refused(rule, target, MADE_ANEW)
        if not is_made_by(target, rule.transform):
            raise _refused(rule, target, OTHER_TRANSFORM)
        if rule.transform is not None or target.origin is None:
            _check_same(rule, target, versions)
            return changes
        views = same_views(target.origin, target.key, versions)
        if views is not None and target.table not in self._suspects:
            return replace(changes, views=views)
        shape = self._inspect(CatalogTable(target.source_oid, target.table))
        _check_shown(shape, [slice for slice in changes.slices if views is None or slice.file.schema not in views])
        origin = replace(target.origin, heap=self._heaps.get((target.table, target.source_oid), target.origin.heap))
        if views is not None and origin.has_all_of(shape.schema):
            self._suspects.discard(target.table)
            return replace(changes, views=views)
        try:
            evolution = plan_following(rule.policy, target, origin, versions, shape)
        except CopyAnew as reason:
            raise _refused(rule, target, str(reason)) from reason
        if not evolution.is_change and evolution.origin.columns == origin.columns:
            return replace(changes, views=evolution.views)
        if not sink.can_evolve(target, evolution):
            raise _refused(rule, target, "its target cannot be altered in place")
        return replace(changes, views=evolution.views, evolution=evolution)

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
    try:
        return [xid for xid in pc.unique(pq.read_table(slice.path, columns=[XID]).column(XID)).to_pylist() if xid is not None]
    except OSError as error:
        raise SpoolCorruptError(f"{slice.path} cannot be read", hint="restore the file, or delete the spool") from error
