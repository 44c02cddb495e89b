"""`PostgresSink`: targets as tables of another Postgres database, with the source's own types.

Data and position are written in one transaction; the position is a row of `penstock.applied`. An epoch is one
task on an executor and one transaction (`postgres/epoch.py`). Each chunk of a snapshot is copied into a
staging table in its own transaction. Then the staging table replaces the target table, in the transaction
that also records the fence (`postgres/snapshot.py`).

Values keep the source's text (`TypePolicy.form`), so every value fits its column, and the target needs no
`_exact`. The position is read before each epoch; it also shows whether a commit succeeded if its reply was
lost.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from typing_extensions import override

from penstock import storage
from penstock.change import EXACT, EXACT_TYPE, ChangeCounts
from penstock.errors import (
    SchemaChangedError,
    SinkError,
    TableRewrittenError,
    TargetForeignError,
)
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.ownership import check_target_table
from penstock.postgres.target.ddl import create_table, difference, drop_table, replace_table, staging_table
from penstock.postgres.target.state import (
    OWN_SCHEMA,
    AppliedRecord,
    TargetLock,
    ensure_prepared,
    forget_chunks,
    forget_record,
    is_prepared,
    is_there,
    load_chunks,
    load_record,
    lock_position,
    owned_tables,
    record_begun,
    record_position,
    record_settled,
    record_shape_of,
    target_transaction,
)
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import (
    ChangedRows,
    ChunkWriter,
    Sink,
    SnapshotFile,
    SnapshotPlace,
    TableChanges,
    Target,
    irreplaceable_error,
    rewound_error,
)
from penstock.sinks.evolution import Evolution
from penstock.sinks.executors import Executors
from penstock.sinks.fold import source_column
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Layout, Mode, ModeOf, mirrored
from penstock.sinks.postgres.epoch import EpochTask, apply_epoch, find_rejected
from penstock.sinks.postgres.rows import is_identified_by_text, source_columns, target_columns
from penstock.sinks.postgres.snapshot import (
    ChunkLoader,
    FinishTask,
    TableSource,
    chunk_name,
    finish,
    read_small,
    read_table,
)
from penstock.sinks.postgres.targets import (
    Naming,
    PostgresTargets,
    evolved_record,
    has_equal_texts,
    plan_alteration,
)
from penstock.sinks.slice_reader import Part, plan_parts, slices_after
from penstock.spool.reader import FileSlice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class PostgresSink(PostgresTargets, Sink):
    def __init__(
        self,
        executors: Executors,
        address: SourceAddress,
        pipeline: str,
        naming: Naming,
        *,
        spark: SparkSession | None = None,
        scratch: Path | None = None,
        mode_of: ModeOf = mirrored,
        lock: TargetLock | None = None,
    ) -> None:
        """`spark` and `scratch`, a directory that executors can access, are needed only by `read`."""
        super().__init__(address, pipeline, naming)
        self._executors = executors
        self._spark = spark
        self._scratch = None if scratch is None else scratch / secrets.token_hex(8)
        self._mode_of = mode_of
        self._lock = lock or TargetLock(address, pipeline)
        self._reached: dict[TableName, Position] = {}
        self._finishing: dict[TableName, str] = {}

    @property
    @override
    def chunk_writer(self) -> ChunkWriter:
        return ChunkLoader(self._address)

    @override
    def close(self) -> None:
        self._lock.close()

    @override
    def _connected(self, doing: str) -> AbstractContextManager[Connection]:
        return self._lock.reading(doing)

    @override
    def load_target(self, table: TableName) -> Target | None:
        target = super().load_target(table)
        self._remember(table, target.applied if target is not None else None)
        return target

    # snapshots
    # --------------------------------------------------------------------------------------------------------

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        layout = self._layout(schema)
        self._lock.ensure()
        former = self.find_record(schema.name)
        token = secrets.token_hex(8)
        columns = target_columns(schema)
        origin = Origin.of(schema)
        known = None if origin is None else str(origin)
        begun = AppliedRecord(
            self._pipeline, schema.name, schema.oid, columns, schema.key, layout.mode, None, token, known
        )
        with target_transaction(self._address, f"creating {self.describe(schema.name)}") as connection:
            ensure_prepared(connection)
            _drop_staging(connection, former)
            create_table(connection, staging_table(token), columns)
            record_begun(connection, self.place(schema.name), begun)
        self._remember(schema.name, None)
        files = (
            layout.columns.append(layout.schema.field(EXACT))
            if EXACT in layout.schema.names
            else layout.columns
        )
        return SnapshotPlace(self.describe(schema.name), files, token)

    @override
    def can_resume_snapshot(
        self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]
    ) -> bool:
        record = self.find_record(schema.name)
        if (
            record is None
            or record.position is not None
            or record.staging != place.prefix
            or record.source_oid != schema.oid
        ):
            return False
        if record.columns != target_columns(schema) or record.mode != self._mode_of(schema.name):
            return False
        with target_transaction(self._address, f"reading {self.describe(schema.name)}") as connection:
            found = {
                chunk_name(number): rows for number, rows in load_chunks(connection, place.prefix).items()
            }
            return is_there(connection, staging_table(place.prefix)) and all(
                found.get(file.name) == file.rows for file in files
            )

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        self._lock.ensure()
        finish(self._finish_task(schema, files, fence, None))
        self._check_reached(schema.name, fence)
        self._finishing.pop(schema.name, None)

    @override
    def repair_snapshot(
        self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position
    ) -> None:
        self._lock.ensure()
        self._executors.run(finish, [self._finish_task(schema, files, fence, changed)])
        self._check_reached(schema.name, fence)
        self._finishing.pop(schema.name, None)

    def _finish_task(
        self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position, changed: ChangedRows | None
    ) -> FinishTask:
        """The task that finishes a snapshot. An earlier attempt may have succeeded although its reply was
        lost, so a repeated attempt gets the same staging table.
        """
        name, place = schema.name, self.place(schema.name)
        record = self.find_record(name)
        token = None if record is None else record.staging
        if (
            record is None
            or token is None
            or (record.position is not None and self._finishing.get(name) != token)
        ):
            raise TableRewrittenError(
                f"{place} was filled or removed by another writer; the snapshot starts again"
            )
        self._finishing[name] = token
        chunks = {file.name: file.rows for file in files}
        return FinishTask(
            self._address, self._pipeline, place, self._layout(schema), token, chunks, fence, changed
        )

    # creating and removing tables
    # ------------------------------------------------------------------------------------------------------

    @override
    def drop(self, table: TableName) -> None:
        self._lock.ensure()
        record = self.find_record(table)
        with target_transaction(self._address, f"dropping {self.describe(table)}") as connection:
            _drop_staging(connection, record)
            drop_table(connection, self.place(table))
            if is_prepared(connection):
                forget_record(connection, self.place(table), self._pipeline)
        self._remember(table, None)

    @override
    def adopt(self, schema: TableSchema) -> bool:
        """The table stays unchanged until the transaction that ends its snapshot. That transaction changes
        only rows that differ.
        """
        self._lock.ensure()
        place, layout, columns = self.place(schema.name), self._layout(schema), target_columns(schema)
        with target_transaction(self._address, f"adopting {self.describe(schema.name)}") as connection:
            ensure_prepared(connection)
            check_target_table(connection, place)
            reason = (
                difference(connection, place, columns, layout.identity)
                if not layout.mode.adds_columns
                else f"{layout.mode} adds columns"
            )
            if reason is not None:
                raise TargetForeignError(
                    f"{self.describe(schema.name)} cannot be adopted: {reason}",
                    hint="alter the table there, or set existing: replace",
                )
            former, _ = load_record(connection, place)
            if former is not None:
                forget_record(connection, place, former.pipeline)
            begun = AppliedRecord(
                self._pipeline, schema.name, schema.oid, columns, schema.key, layout.mode, None, None
            )
            record_begun(connection, place, begun)
        return False

    @override
    def remove_foreign(self, table: TableName) -> None:
        self._lock.ensure()
        place = self.place(table)
        with target_transaction(self._address, f"dropping {self.describe(table)}") as connection:
            drop_table(connection, place)
            former = load_record(connection, place)[0] if is_prepared(connection) else None
            if former is not None:
                forget_record(connection, place, former.pipeline)
        self._remember(table, None)

    @override
    def release_ownership(self, table: TableName) -> None:
        if self.find_record(table) is not None:
            self._record_position(table, None)
        self._remember(table, None)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        self._lock.ensure()
        mine = self.find_record(table)
        if (
            not isinstance(shadow, PostgresSink)
            or mine is None
            or (found := shadow.find_record(table)) is None
        ):
            raise irreplaceable_error(self.describe(table))
        identity = Layout(source_columns(found.columns), found.key, Mode(found.mode)).identity
        place, other = self.place(table), shadow.place(table)
        with target_transaction(self._address, f"replacing {self.describe(table)}") as connection:
            ensure_prepared(connection)
            lock_position(connection, place, self._pipeline)
            replace_table(connection, other, place, identity)
            record_shape_of(connection, place, other)
            record_settled(connection, place, self._pipeline, position)
        self._remember(table, None)
        self._check_reached(table, position)

    @override
    def shadow(self, copy: str) -> Sink:
        return PostgresSink(
            self._executors,
            self._address,
            self._pipeline,
            Naming(shadow=copy),
            spark=self._spark,
            scratch=None,
            mode_of=self._mode_of,
            lock=self._lock,
        )

    @override
    def drop_shadows(self) -> None:
        self._lock.ensure()
        with target_transaction(
            self._address, f"removing leftover resync copies in {self._address.describe()}"
        ) as connection:
            if is_prepared(connection):
                for place in owned_tables(connection, self._pipeline, OWN_SCHEMA):
                    drop_table(connection, place)
                    forget_record(connection, place, self._pipeline)

    @override
    def version_at(self, table: TableName, position: Position) -> int | None:
        """Return the current position if it is at or before `position`. A table has no older versions."""
        record = self.find_record(table)
        return (
            record.position.value
            if record is not None and record.position is not None and record.position <= position
            else None
        )

    @override
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        record = self.find_record(table)
        if record is None or self._spark is None or self._scratch is None:
            raise SinkError(f"{self.describe(table)} cannot be read: it does not exist")
        # A derived DataFrame does not keep the first one alive, so the files exist as long as this sink.
        weakref.finalize(self, storage.discard_tree, self._scratch)
        return read_table(self._spark, self._executors, self._readable(table, record, version), self._scratch)

    @override
    def read_small(self, table: TableName, version: int | None, limit_bytes: int) -> pa.Table | None:
        record = self.find_record(table)
        return None if record is None else read_small(self._readable(table, record, version), limit_bytes)

    def _readable(self, table: TableName, record: AppliedRecord, version: int | None) -> TableSource:
        layout = Layout(source_columns(record.columns), record.key, Mode(record.mode))
        return TableSource(
            self._address,
            self._pipeline,
            self.place(table),
            layout,
            None if version is None else Position.of(version),
        )

    # epochs
    # --------------------------------------------------------------------------------------------------------

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        self._lock.ensure()
        record = self._checked_record(target)
        assert record.position is not None
        if record.position >= end:
            return
        self._check_shape(record, target, changes)
        slices = slices_after(changes.slices, record.position)
        if slices or changes.evolution is not None:
            self._executors.run(
                apply_epoch, [self._epoch_task(record, replace(changes, slices=slices), record.position, end)]
            )
        else:
            self._record_position(target.table, end)
        self._check_reached(target.table, end)

    @override
    def find_rejected(
        self, target: Target, changes: TableChanges, end: Position
    ) -> dict[tuple[int, int], str]:
        record = self._checked_record(target)
        assert record.position is not None
        slices = slices_after(changes.slices, record.position)
        task = self._epoch_task(record, replace(changes, slices=slices), record.position, end)
        return self._executors.run(find_rejected, [task])[0]

    @override
    def can_evolve(self, target: Target, evolution: Evolution) -> bool:
        record = self.find_record(target.table)
        return record is not None and _is_known_as(record, target) and has_equal_texts(record, evolution)

    def _epoch_task(
        self, record: AppliedRecord, changes: TableChanges, start: Position, end: Position
    ) -> EpochTask:
        evolution = changes.evolution
        becomes = record if evolution is None else evolved_record(record, evolution)
        layout = Layout(source_columns(becomes.columns), becomes.key, Mode(becomes.mode))
        counts = sum((slice.file.counts for slice in changes.slices), ChangeCounts())
        by_source = counts.truncates and source_column(changes.views.values()) is not None
        return EpochTask(
            self._address,
            self._pipeline,
            self.place(changes.table),
            layout,
            tuple(changes.slices),
            changes.views,
            _parts(
                layout,
                changes.slices,
                counts,
                can_part=not by_source and is_identified_by_text(becomes.columns, becomes.key),
            ),
            start,
            end,
            None if evolution is None else (becomes, plan_alteration(record, evolution)),
        )

    def _checked_record(self, target: Target) -> AppliedRecord:
        """The record of the table. Raises `TargetRewoundError` if its position is lower than a position that
        was read before.
        """
        record = self.find_record(target.table)
        known = max(self._reached.get(target.table, Position.ZERO), target.applied or Position.ZERO)
        applied = None if record is None else record.position
        if record is None or applied is None or applied < known:
            raise rewound_error(self.describe(target.table), target.table, applied, known)
        return record

    def _check_shape(self, record: AppliedRecord, target: Target, changes: TableChanges) -> None:
        """Raise `SchemaChangedError` if the changes do not fit the table. Views are valid only for the
        columns that they were planned for; changes without a view must have the columns of the table.
        """
        if changes.views or changes.evolution is not None:
            is_same = _is_known_as(record, target) and changes.views.keys() >= set(changes.schemas)
        else:
            known = (record.source_oid, record.key, record.columns)
            is_same = all(
                (schema.oid, schema.key, target_columns(schema)) == known for schema in changes.schemas
            )
        if not is_same or record.mode != self._mode_of(changes.table):
            raise SchemaChangedError(
                f"table {changes.table} changed its columns, its key, its mode or its identity, and the "
                "target cannot follow that",
                hint=(
                    f"penstock tables resync CONFIG {changes.table}, or drop {self.describe(changes.table)} "
                    "and restart the pipeline to copy the table again"
                ),
            )

    def _layout(self, schema: TableSchema) -> Layout:
        for column in schema.columns:
            assert column.arrow_type == EXACT_TYPE.key_type, "a pipeline into Postgres reads values as text"
        return Layout(source_columns(target_columns(schema)), schema.key, self._mode_of(schema.name))

    def _record_position(self, table: TableName, position: Position | None) -> None:
        with target_transaction(
            self._address, f"recording the position of {self.describe(table)}"
        ) as connection:
            record_position(connection, self.place(table), self._pipeline, position)

    def _check_reached(self, table: TableName, position: Position) -> None:
        record = self.find_record(table)
        if record is None or record.position != position:
            raise SinkError(
                f"{self.describe(table)} is not at {position}, although the server reported no error"
            )
        self._remember(table, position)

    def _remember(self, table: TableName, position: Position | None) -> None:
        if position is None:
            self._reached.pop(table, None)
        else:
            self._reached[table] = position


def _is_known_as(record: AppliedRecord, target: Target) -> bool:
    origin = None if record.origin is None else Origin.parse(record.origin)
    return (record.source_oid, record.key, origin) == (target.source_oid, target.key, target.origin)


def _drop_staging(connection: Connection, record: AppliedRecord | None) -> None:
    if record is not None and record.staging is not None:
        drop_table(connection, staging_table(record.staging))
        forget_chunks(connection, record.staging)


def _parts(
    layout: Layout, slices: Sequence[FileSlice], counts: ChangeCounts, *, can_part: bool
) -> tuple[Part | None, ...]:
    """The parts into which an epoch is divided for its reduction; empty if the epoch only adds rows. If
    `can_part` is false, there is one part with all keys (None).
    """
    if layout.mode.adds_only(counts):
        return ()
    return tuple(plan_parts(slices, counts, looks_up=layout.mode.keeps_past_rows)) if can_part else (None,)
