"""`DeltaSink`: targets as Delta tables, one directory each.

Each commit has the data and the position, which is the version of the table's transaction id. A snapshot is
one commit of files that executors wrote. An epoch is one commit (`delta/epoch.py`). If a table has features
that Penstock's own commits do not support, Spark makes that commit (`delta/spark_merge.py`). An epoch always
commits and moves the position, even if it changes no row.

Before each epoch the position is loaded from the table, and changes up to it are left out. So a repeated or
older epoch changes nothing. If the position is lower than before, the table was dropped or restored, and
nothing is written. A commit names its version. If another writer has made that version, the epoch is planned
again.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from penstock import storage
from penstock.change import ChangeCounts
from penstock.errors import (
    PenstockError,
    SchemaChangedError,
    SinkError,
    SinkRefusedError,
    SlowTableError,
    TableRewrittenError,
)
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import (
    SHADOWS,
    ChangedRows,
    MaintenanceSettings,
    Sink,
    SnapshotFile,
    SnapshotPlace,
    TableChanges,
    Target,
    check_changes,
    irreplaceable_error,
    rewound_error,
)
from penstock.sinks.dataframes import load_changes
from penstock.sinks.delta.commit import ATTEMPTS
from penstock.sinks.delta.compaction import SharedTable
from penstock.sinks.delta.definition import (
    check_adoptable,
    definition,
    evolve_state,
    is_unchanged,
    ownership,
    snapshot_place,
    table_properties,
)
from penstock.sinks.delta.epoch import DeltaCommit, read_small
from penstock.sinks.delta.log import (
    COPY,
    KEY,
    ORIGIN,
    DeltaTargets,
    active_files,
    adopt_files,
    application_id,
    load_applied,
    load_with_position,
    record_position,
    remove_attempts,
    remove_half_made,
    settle_restored,
    unfinished_files,
    version_at,
)
from penstock.sinks.delta.maintenance import DeltaMaintenance
from penstock.sinks.delta.spark_merge import (
    VIEW,
    DeltaSessions,
    check_not_moved,
    find_rejected,
    first_line,
    merge_changes,
    replace_statement,
    replacements,
    translated_errors,
)
from penstock.sinks.delta.state import DeltaState, DeltaStates, Unsupported, can_delete, check_writable
from penstock.sinks.delta.swap import DeltaSwap, align_columns, link_files, remove_links, set_properties
from penstock.sinks.evolution import Evolution
from penstock.sinks.executors import Executors, SparkExecutors
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Layout, ModeOf, mirrored
from penstock.sinks.slice_reader import slices_after, step_ends
from penstock.spool.reader import FileSlice

_log = logging.getLogger(__name__)

_ROWS_A_STEP = 2_000_000
_MERGE_COST = 40
"""Factor by which MERGE slows down an epoch of a thousand changes, for a table of a million rows."""


class DeltaSink(DeltaTargets, Sink):
    """Delta tables of one pipeline. A table whose mode differs from `mode_of` is rejected."""

    def __init__(
        self,
        spark: SparkSession,
        root: Path,
        pipeline: str,
        mode_of: ModeOf = mirrored,
        maintenance: MaintenanceSettings | None = None,
        *,
        original: DeltaTargets | None = None,
    ) -> None:
        """`original`: for a sink of shadows, the targets that the shadows will replace."""
        super().__init__(root, pipeline)
        self._spark = spark
        self._mode_of = mode_of
        self._executors: Executors = SparkExecutors(spark)
        self._states = DeltaStates()
        self._maintenance = DeltaMaintenance(spark, self._executors, maintenance or MaintenanceSettings())
        self._commit_locks: dict[TableName, threading.Lock] = {}
        self._sessions = DeltaSessions(spark)
        self._reached: dict[TableName, Position] = {}
        self._original = original
        self._slow: dict[TableName, SlowTableError] = {}

    @override
    def load_target(self, table: TableName) -> Target | None:
        settle_restored(self.path(table), self._application(table))
        target = super().load_target(table)
        self._set_reached(table, target.applied if target is not None else None)
        return target

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        path = self.path(schema.name)
        target = self.load_target(schema.name)
        if target is not None and target.applied is not None:
            # A replaced table keeps its transaction ids, so the old position would remain, without rows.
            record_position(path, self._application(schema.name), Position.ZERO)
        self._set_reached(schema.name, None)
        leftovers = unfinished_files(path)
        layout = self._layout(schema)
        # CREATE OR REPLACE does not replace a table identified by its path: Delta only compares the schemas.
        verb = "CREATE" if target is None else "REPLACE"
        if target is None:
            remove_half_made(path)
        with translated_errors(path, "creating"):
            properties = table_properties(self._pipeline, layout, schema.oid, Origin.of(schema))
            self._spark.sql(
                f"{verb} TABLE {definition(path, layout, {**properties, COPY: secrets.token_hex(8)})}"
            )
        for leftover in leftovers:
            storage.delete(leftover)
        if self._original is not None:
            align_columns(path, self._original.path(schema.name))
        place = snapshot_place(path, layout, fence)
        if place is None:
            raise SinkError(f"the Delta table at {path} disappeared right after it was created")
        return place

    @override
    def can_resume_snapshot(
        self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]
    ) -> bool:
        path = self.path(schema.name)
        target = self.load_target(schema.name)
        if (
            target is None
            or target.applied is not None
            or place.directory != str(path)
            or target.source_oid != schema.oid
        ):
            return False
        layout = self._layout(schema)
        now = snapshot_place(path, layout, Position.ZERO)
        if now is None or now.schema != place.schema or target.mode is not layout.mode:
            return False
        found = {
            entry.name: storage.size_bytes(entry)
            for entry in storage.list_paths(path, f"{place.prefix}-*.parquet")
        }
        return all(found.get(file.name) == file.bytes for file in files if file.rows)

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        path = self.path(schema.name)
        self._check_empty(schema.name)
        adopt_files(path, self._application(schema.name), files, fence)
        self._set_reached(schema.name, fence)
        remove_attempts(path, files)

    @override
    def repair_snapshot(
        self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position
    ) -> None:
        path, application = self.path(schema.name), self._application(schema.name)
        self._check_empty(schema.name)
        # An earlier attempt may have added the files, and failed afterwards.
        if not {path / file.name for file in files} & active_files(path):
            adopt_files(path, application, files, Position.ZERO)
        layout = self._layout(schema)
        try:
            self._repair(path, application, layout, changed, fence)
        except Unsupported as reason:
            self._fall_back_to_merge(schema.name, layout, reason)
            session = self._session_at(schema.name, fence)
            with translated_errors(path, "replacing changed rows of"):
                replacements(session, layout.columns, schema.key, changed).createOrReplaceTempView(VIEW)
                session.sql(replace_statement(str(path), VIEW, layout.columns, schema.key)).collect()
        self._check_reached(schema.name, fence)
        remove_attempts(path, files)

    def _repair(
        self, path: Path, application: str, layout: Layout, changed: ChangedRows, fence: Position
    ) -> None:
        for _ in range(ATTEMPTS):
            state, place = self._states.load(path), snapshot_place(path, layout, fence)
            if state is None or place is None:
                break
            if DeltaCommit(path, application, layout, state, fence).repair(changed, place, self._executors):
                return
        raise SinkError(
            f"{path} does not exist, or other writers commit to it faster than it can be repaired"
        )

    @override
    def drop(self, table: TableName) -> None:
        storage.discard_tree(self.path(table))
        self._set_reached(table, None)

    @override
    def adopt(self, schema: TableSchema) -> bool:
        path, layout = self.path(schema.name), self._layout(schema)
        check_adoptable(path, layout)
        set_properties(path, self._spark, ownership(self._pipeline, layout, schema.oid))
        return True

    @override
    def release_ownership(self, table: TableName) -> None:
        if load_applied(self.path(table), self._application(table)) is not None:
            record_position(self.path(table), self._application(table), Position.ZERO)
        self._set_reached(table, None)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        found, mine = shadow.load_target(table), self.load_target(table)
        if not isinstance(shadow, DeltaSink) or found is None or mine is None:
            raise irreplaceable_error(self.path(table))
        with self._commit_lock(table):
            DeltaSwap(self.path(table), shadow.path(table), self._application(table), mine, found).make(
                self._session_at, position
            )
        self._set_reached(table, None)
        self._check_reached(table, position)

    @override
    def prepare_replace(self, table: TableName, shadow: Sink) -> None:
        if isinstance(shadow, DeltaSink):
            with suppress(Unsupported):  # then Delta rewrites the rows in `replace`
                link_files(self.path(table), shadow.path(table))

    @override
    def cancel_replace(self, table: TableName, shadow: Sink) -> None:
        if isinstance(shadow, DeltaSink):
            remove_links(self.path(table), shadow.path(table))

    @override
    def shadow(self, copy: str) -> Sink:
        return DeltaSink(
            self._spark,
            self._root / SHADOWS / self._pipeline / copy,
            self._pipeline,
            self._mode_of,
            original=self,
        )

    @override
    def drop_shadows(self) -> None:
        shadows = self._root / SHADOWS / self._pipeline
        for log in storage.list_paths(shadows, "*/*/*/_delta_log"):
            with suppress(
                PenstockError, OSError
            ):  # an unreadable table fails elsewhere, and VACUUM removes remaining links
                remove_links(self._root / log.parent.relative_to(log.parents[2]), log.parent)
        storage.discard_tree(shadows)

    @override
    def version_at(self, table: TableName, position: Position) -> int | None:
        return version_at(self.path(table), self._application(table), position)

    @override
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        reader = self._spark.read.format("delta")
        reader = reader if version is None else reader.option("versionAsOf", version)
        return reader.load(str(self.path(table)))

    @override
    def read_small(self, table: TableName, version: int | None, limit_bytes: int) -> pa.Table | None:
        return read_small(self.path(table), version, limit_bytes)

    @override
    def maintain(self, table: TableName) -> None:
        self._maintenance.run(
            SharedTable(self.path(table), self._commit_lock(table), lambda: self._load_state(table)[0]),
            self._application(table),
        )

    def _commit_lock(self, table: TableName) -> threading.Lock:
        """The lock that keeps an epoch and maintenance from committing to the table at the same time.
        Maintenance holds it only for milliseconds.
        """
        return self._commit_locks.setdefault(table, threading.Lock())

    def _check_empty(self, table: TableName) -> None:
        """Raise if the table has a position, because adding a snapshot would then duplicate every row."""
        if load_applied(self.path(table), self._application(table)) is not None:
            raise TableRewrittenError(
                f"{self.path(table)} was filled by another writer; the snapshot starts again"
            )

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        check_changes(target, self._mode_of(target.table), changes, str(self.path(target.table)))
        schema = next(iter(changes.schemas), None)
        with self._commit_lock(target.table):
            self._apply_changes(target, changes, schema, end)

    @override
    def steps(self, slices: Sequence[FileSlice], end: Position) -> list[Position]:
        return step_ends(slices, _ROWS_A_STEP, end)

    def _apply_changes(
        self, target: Target, changes: TableChanges, schema: TableSchema | None, end: Position
    ) -> None:
        for _ in range(ATTEMPTS):
            state, applied = self._load_state(target.table)
            reached = self._checked_position(target, applied)
            if reached >= end:
                return
            if self._apply_once(
                target, replace(changes, slices=slices_after(changes.slices, reached)), schema, state, end
            ):
                self._check_reached(target.table, end)
                return
        raise SinkError(
            f"other writers commit to {self.path(target.table)} faster than an epoch can be planned"
        )

    def _load_state(self, table: TableName) -> tuple[DeltaState | None, Position | None]:
        return load_with_position(self._states, self.path(table), self._application(table))

    @override
    def can_evolve(self, target: Target, evolution: Evolution) -> bool:
        state, _ = self._load_state(target.table)
        try:
            if state is None:
                return False
            check_writable(state)
            evolve_state(state, evolution, target.mode, {})
        except Unsupported:
            return False
        return can_delete(state)

    def _apply_once(
        self,
        target: Target,
        changes: TableChanges,
        schema: TableSchema | None,
        state: DeltaState | None,
        end: Position,
    ) -> bool:
        """Plan and make one commit that brings the table to `end`. Returns False if another writer committed
        first and nothing was changed.
        """
        path, application = self.path(target.table), self._application(target.table)
        layout = Layout(target.schema, target.key, target.mode)
        try:
            if state is None:
                raise Unsupported("its log has an unsupported format")
            if not is_unchanged(state.metadata, layout, target.source_oid):
                raise SchemaChangedError(
                    f"{path} has other columns, or another source table, than this run expects: another run "
                    "or program changed it",
                    hint=f"penstock tables resync CONFIG {target.table}, or remove {path} and restart the "
                    "pipeline to copy the table again",
                )
            is_ours = self._plan_commit(target, changes, state, end).apply(self._executors)
            self._slow.pop(target.table, None)
            return is_ours
        except Unsupported as reason:
            is_plain = changes.evolution is None and (
                schema is None or schema.column_names == tuple(target.schema.names)
            )
            self._fall_back_to_merge(target.table, layout, reason, is_plain=is_plain)
        if schema is not None and changes.slices:
            self._merge(target, schema, changes.slices, end, None if state is None else state.version)
        else:
            record_position(path, application, end)
        return True

    def _plan_commit(
        self, target: Target, changes: TableChanges, state: DeltaState, end: Position
    ) -> DeltaCommit:
        path, application, evolution = (
            self.path(target.table),
            self._application(target.table),
            changes.evolution,
        )
        if evolution is None:
            layout = Layout(target.schema, target.key, target.mode)
            return DeltaCommit(path, application, layout, state, end, changes.slices, views=changes.views)
        layout = Layout(evolution.columns, evolution.key, target.mode)
        properties = table_properties(self._pipeline, layout, target.source_oid, evolution.origin)
        evolved = evolve_state(
            state, evolution, target.mode, {name: properties[name] for name in (KEY, ORIGIN)}
        )
        return DeltaCommit(
            path,
            application,
            layout,
            evolved.state,
            end,
            changes.slices,
            views=changes.views,
            declared=evolved.actions,
            fills=evolved.fills if evolved.is_rewritten else None,
        )

    def _fall_back_to_merge(
        self, table: TableName, layout: Layout, reason: Unsupported, *, is_plain: bool = True
    ) -> None:
        """Raise unless Spark's MERGE supports the epoch: the table must be a mirror with a key, and the
        changes must have exactly its columns. If it does, record a warning that MERGE is slow.
        """
        if layout.mode.adds_columns or not layout.key or not is_plain:
            raise SinkRefusedError(
                f"{self.path(table)} cannot be written to: {reason}",
                hint=f"remove the cause from the table, or remove {self.path(table)} and restart the "
                "pipeline to copy it again",
            )
        warning = SlowTableError(
            f"{self.path(table)} is written by MERGE, about {_MERGE_COST} times slower than by our own "
            f"commits, because {reason}",
            hint="drop the feature or property (ALTER TABLE … DROP FEATURE), "
            f"or remove {self.path(table)} to copy the table again",
        )
        known = self._slow.get(table)
        if known is None or known.message != warning.message:
            _log.warning(
                "table is written by MERGE",
                extra={"table": str(table), "reason": str(reason), "times_slower": _MERGE_COST},
            )
        self._slow[table] = warning

    @override
    def slow_warning(self, table: TableName) -> PenstockError | None:
        return self._slow.get(table)

    @override
    def find_rejected(
        self, target: Target, changes: TableChanges, end: Position
    ) -> dict[tuple[int, int], str]:
        state, applied = self._load_state(target.table)
        slices, path = slices_after(changes.slices, applied or Position.ZERO), self.path(target.table)
        if state is None or not slices:
            return {}
        session = self._session_at(target.table, end)
        read = self._load_dataframe(session, target, changes.schemas[0], slices)
        with translated_errors(path, "finding changes rejected by"):
            return find_rejected(
                session, str(path), target, read, counts=_counts(slices), metadata=state.metadata
            )

    def _load_dataframe(
        self, session: SparkSession, target: Target, schema: TableSchema, slices: Sequence[FileSlice]
    ) -> DataFrame:
        try:
            return load_changes(session, schema, slices)
        except AnalysisException as error:
            raise SinkError(
                f"the spooled changes of {target.table} cannot be read: {first_line(error)}"
            ) from error

    def _merge(
        self,
        target: Target,
        schema: TableSchema,
        slices: Sequence[FileSlice],
        end: Position,
        version: int | None,
    ) -> None:
        session, path, counts = self._session_at(target.table, end), self.path(target.table), _counts(slices)
        changes = self._load_dataframe(session, target, schema, slices)
        # A MERGE by key has the same result if some changes were already applied.
        is_repeatable = not counts.unchanged and (
            counts.updates or counts.deletes or counts.moves or counts.truncates
        )
        if version is not None and not is_repeatable:
            changes = check_not_moved(changes, path, self._application(target.table), version)
        with translated_errors(path, "applying changes to"):
            merge_changes(session, str(path), target, changes, counts, may_append=version is not None)

    def _check_reached(self, table: TableName, position: Position) -> None:
        if self._load_state(table)[1] != position:
            raise SinkError(f"{self.path(table)} is not at {position}, although no error was reported")
        self._set_reached(table, position)

    def _session_at(self, table: TableName, position: Position) -> SparkSession:
        """The table's session, which writes `position` with its next commit."""
        return self._sessions.at(self._application(table), position)

    def _checked_position(self, target: Target, applied: Position | None) -> Position:
        """Return `applied`, the table's position. Raises if the position was higher before."""
        known = max(self._reached.get(target.table, Position.ZERO), target.applied or Position.ZERO)
        if applied is None or applied < known:
            raise rewound_error(str(self.path(target.table)), target.table, applied, known)
        return applied

    def _set_reached(self, table: TableName, position: Position | None) -> None:
        if position is None:
            self._reached.pop(table, None)
        else:
            self._reached[table] = position

    def _application(self, table: TableName) -> str:
        return application_id(self._pipeline, table)

    def _layout(self, schema: TableSchema) -> Layout:
        columns = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
        return Layout(columns, schema.key, self._mode_of(schema.name))


def _counts(slices: Sequence[FileSlice]) -> ChangeCounts:
    return sum((slice.file.counts for slice in slices), ChangeCounts())
