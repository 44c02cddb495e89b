"""An epoch applier over a sink in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import DataFrame
from typing_extensions import override

from penstock.errors import PenstockError, SinkRefusedError, SlowTableError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import ChangedRows, Sink, SnapshotFile, SnapshotPlace, TableChanges, Target
from tests.support.spool.builders import ITEMS, ORDERS, at

FIRST, SECOND = ORDERS.name, ITEMS.name


class PositionSink(Sink):
    """The changes each table has applied, and its position."""

    def __init__(self) -> None:
        self.applied: dict[TableName, Position] = {}
        self.taken: dict[TableName, list[tuple[int, int]]] = {}
        self.refuses = False
        self.slow: SlowTableError | None = None
        self.replaced: list[TableName] = []
        self.prepared: list[TableName] = []
        self.cancelled: list[TableName] = []
        self.refuses_preparing = False
        self.targets: dict[TableName, Target] = {}

    def target(self, schema: TableSchema, position: int) -> Target:
        columns = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
        self.applied[schema.name] = at(position)
        self.targets[schema.name] = Target(schema.name, schema.oid, schema.key, columns, at(position))
        return self.targets[schema.name]

    @override
    def load_target(self, table: TableName) -> Target | None:
        if table not in self.applied:
            return None
        target = self.targets.get(table) or Target(table, 1, ("id",), pa.schema([]), self.applied[table])
        return replace(target, applied=self.applied[table])

    @override
    def describe(self, table: TableName) -> str:
        return str(table)

    @override
    def are_distinct(self, one: TableName, other: TableName) -> bool:
        return True

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        raise AssertionError

    @override
    def can_resume_snapshot(
        self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]
    ) -> bool:
        raise AssertionError

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        raise AssertionError

    @override
    def repair_snapshot(
        self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position
    ) -> None:
        raise AssertionError

    @override
    def drop(self, table: TableName) -> None:
        self.applied.pop(table, None)

    @override
    def release_ownership(self, table: TableName) -> None:
        self.applied.pop(table, None)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        if self.refuses:
            raise SinkRefusedError("no", hint="no")
        self.applied[table] = position
        self.replaced.append(table)

    @override
    def prepare_replace(self, table: TableName, shadow: Sink) -> None:
        if self.refuses_preparing:
            raise SinkRefusedError("no", hint="no")
        self.prepared.append(table)

    @override
    def cancel_replace(self, table: TableName, shadow: Sink) -> None:
        self.cancelled.append(table)

    @override
    def shadow(self, copy: str) -> Sink:
        raise AssertionError

    @override
    def drop_shadows(self) -> None:
        raise AssertionError

    @override
    def version_at(self, table: TableName, position: Position) -> int | None:
        raise AssertionError

    @override
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        raise AssertionError

    @override
    def slow_warning(self, table: TableName) -> PenstockError | None:
        return self.slow if table == FIRST else None

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        self.taken.setdefault(target.table, []).append((self.applied[target.table].value, end.value))
        self.applied[target.table] = end
