"""`DeltaSink`: tables as Delta tables, one directory each.

Data and position commit together: the position is the version of the table's own transaction id, which stands in the same commit. A
snapshot is one commit of files that executors wrote; an epoch is one commit of rows that go and rows that come (`delta/epoch.py`), or, for
a table that asks for more than that knows, of Delta's own (`delta/merge.py`). Each of them commits, and so moves the position, even if it
comes to no change at all.

Before each epoch the table itself is asked how far it is. Changes that it has are left out, whatever the caller believes, so a repeated or
older epoch changes nothing; if it has less than it had before, somebody else dropped or restored it, and nothing is written. The commit
names the version that it makes: if somebody else made that one meanwhile, the table is asked again, and the epoch worked out anew.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from penstock.change import ChangeCounts
from penstock.errors import (
    PenstockError,
    SchemaChangedError,
    SinkError,
    SinkRefusedError,
    SlowTableError,
    TableRewrittenError,
    TargetRewoundError,
)
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import SHADOWS, ChangedRows, Sink, SnapshotFile, SnapshotPlace, TableChanges, Target, rewound
from penstock.sinks.changed import replacements
from penstock.sinks.delta.compaction import SharedTable
from penstock.sinks.delta.definition import (
    check_adoptable,
    definition,
    is_as_begun,
    ownership,
    snapshot_place,
    table_properties,
)
from penstock.sinks.delta.epoch import DeltaEpoch
from penstock.sinks.delta.evolution import evolve_state
from penstock.sinks.delta.leftovers import remove_attempts, remove_half_made, unfinished_files
from penstock.sinks.delta.log import (
    COPY,
    KEY,
    ORIGIN,
    active_files,
    adopt_files,
    application_id,
    load_applied,
    record_position,
    settle_restored,
    version_at,
)
from penstock.sinks.delta.merge import VIEW, merge_changes, replace_statement, unless_moved
from penstock.sinks.delta.protocol import can_delete, check_writable
from penstock.sinks.delta.refusals import find_refused
from penstock.sinks.delta.sessions import DeltaSessions, failing, first_line
from penstock.sinks.delta.state import DeltaState, Unsupported
from penstock.sinks.delta.step import read_small
from penstock.sinks.delta.swap import DeltaSwap, align_columns, link_files, remove_links, set_properties
from penstock.sinks.delta.targets import DeltaTargets
from penstock.sinks.delta.upkeep import DeltaUpkeep
from penstock.sinks.delta.writer import ATTEMPTS, DeltaWriter
from penstock.sinks.evolution import Evolution
from penstock.sinks.executors import SparkExecutors
from penstock.sinks.fitting import check_changes
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.origin import Origin
from penstock.sinks.slices import load_changes, slices_after
from penstock.sinks.steps import slices_upto, step_ends
from penstock.sinks.upkeep import Upkeep
from penstock.spool.range import FileSlice

_log = logging.getLogger(__name__)

_ROWS_A_STEP = 2_000_000
_MERGE_COST = 40
"""How many times longer an epoch of a thousand changes takes by MERGE, in a table of a million rows."""


ModeOf = Callable[[TableName], Mode]


def mirrored(_: TableName) -> Mode:
    return Mode.MIRROR


class DeltaSink(DeltaTargets, Sink):
    """`mode_of`: how each table is to be kept; a table that is there and is kept in another way is refused."""

    def __init__(
        self,
        spark: SparkSession,
        root: Path,
        pipeline: str,
        mode_of: ModeOf = mirrored,
        upkeep: Upkeep | None = None,
        *,
        original: DeltaTargets | None = None,
    ) -> None:
        """`original`: the tables whose place those of this sink are to take, if it is for shadows."""
        super().__init__(root, pipeline)
        self._spark = spark
        self._mode_of = mode_of
        executors = SparkExecutors(spark)
        self._writer = DeltaWriter(executors)
        self._upkeep = DeltaUpkeep(spark, executors, upkeep or Upkeep())
        self._turns: dict[TableName, threading.Lock] = {}
        self._sessions = DeltaSessions(spark)
        self._reached: dict[TableName, Position] = {}
        self._original = original
        self._slow: dict[TableName, SlowTableError] = {}

    @override
    def load_target(self, table: TableName) -> Target | None:
        settle_restored(self.path(table), self._application(table))
        target = super().load_target(table)
        self._remember(table, target.applied if target is not None else None)
        return target

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        path = self.path(schema.name)
        target = self.load_target(schema.name)
        if target is not None and target.applied is not None:
            # A replaced table keeps its transaction ids: the old position would stand beside no rows.
            record_position(path, self._application(schema.name), Position.ZERO)
        self._remember(schema.name, None)
        leftovers = unfinished_files(path)
        layout = self._layout(schema)
        # CREATE OR REPLACE would not replace: for a table known by its path, Delta only compares the schemas.
        verb = "CREATE" if target is None else "REPLACE"
        if target is None:
            remove_half_made(path)
        with failing(path, "creating"):
            properties = table_properties(self._pipeline, layout, schema.oid, Origin.of(schema))
            self._spark.sql(f"{verb} TABLE {definition(path, layout, {**properties, COPY: secrets.token_hex(8)})}")
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)
        if self._original is not None:
            align_columns(path, self._original.path(schema.name))
        place = snapshot_place(path, layout, fence)
        if place is None:
            raise SinkError(f"the Delta table at {path} vanished right after it was created")
        return place

    @override
    def can_resume_snapshot(self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]) -> bool:
        path = self.path(schema.name)
        target = self.load_target(schema.name)
        if target is None or target.applied is not None or place.directory != str(path) or target.source_oid != schema.oid:
            return False
        layout = self._layout(schema)
        now = snapshot_place(path, layout, Position.ZERO)
        if now is None or now.schema != place.schema or target.mode is not layout.mode:
            return False
        found = {entry.name: entry.stat().st_size for entry in path.glob(f"{place.prefix}-*.parquet")}
        return all(found.get(file.name) == file.bytes for file in files if file.rows)

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        path = self.path(schema.name)
        self._check_empty(schema.name)
        adopt_files(path, self._application(schema.name), files, fence)
        self._remember(schema.name, fence)
        remove_attempts(path, files)

    @override
    def repair_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position) -> None:
        path, application = self.path(schema.name), self._application(schema.name)
        self._check_empty(schema.name)
        # An attempt that did not get to its end may have come as far as this.
        if not {path / file.name for file in files} & active_files(path):
            adopt_files(path, application, files, Position.ZERO)
        layout = self._layout(schema)
        try:
            self._writer.repair(path, application, layout, changed, fence)
        except Unsupported as reason:
            self._leave_to_delta(schema.name, layout, reason)
            session = self._transaction(schema.name, fence)
            with failing(path, "replacing changed rows of"):
                replacements(session, layout.columns, schema.key, changed).createOrReplaceTempView(VIEW)
                session.sql(replace_statement(str(path), VIEW, layout.columns, schema.key)).collect()
        self._check_reached(schema.name, fence)
        remove_attempts(path, files)

    @override
    def drop(self, table: TableName) -> None:
        shutil.rmtree(self.path(table), ignore_errors=True)
        self._remember(table, None)

    @override
    def adopt(self, schema: TableSchema) -> bool:
        path, layout = self.path(schema.name), self._layout(schema)
        check_adoptable(path, layout)
        set_properties(path, self._spark, ownership(self._pipeline, layout, schema.oid))
        return True

    @override
    def disown(self, table: TableName) -> None:
        if load_applied(self.path(table), self._application(table)) is not None:
            record_position(self.path(table), self._application(table), Position.ZERO)
        self._remember(table, None)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        found, mine = shadow.load_target(table), self.load_target(table)
        if not isinstance(shadow, DeltaSink) or found is None or mine is None:
            raise TargetRewoundError(
                f"{self.path(table)} is gone, so nothing can take its place", hint="restart the pipeline to copy the table anew"
            )
        with self._turn(table):
            DeltaSwap(self.path(table), shadow.path(table), self._application(table), mine, found).make(self._transaction, position)
        self._remember(table, None)
        self._check_reached(table, position)

    @override
    def prepare_replace(self, table: TableName, shadow: Sink) -> None:
        if isinstance(shadow, DeltaSink):
            with suppress(Unsupported):  # then Delta puts it in place
                link_files(self.path(table), shadow.path(table))

    @override
    def cancel_replace(self, table: TableName, shadow: Sink) -> None:
        if isinstance(shadow, DeltaSink):
            remove_links(self.path(table), shadow.path(table))

    @override
    def shadow(self, copy: str) -> Sink:
        return DeltaSink(self._spark, self._root / SHADOWS / self._pipeline / copy, self._pipeline, self._mode_of, original=self)

    @override
    def drop_shadows(self) -> None:
        shadows = self._root / SHADOWS / self._pipeline
        for log in sorted(shadows.glob("*/*/*/_delta_log")):
            with suppress(PenstockError, OSError):  # of a table that cannot be read, which fails by itself; VACUUM takes away what stays
                remove_links(self._root / log.parent.relative_to(log.parents[2]), log.parent)
        shutil.rmtree(shadows, ignore_errors=True)

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
        self._upkeep.keep(SharedTable(self.path(table), self._turn(table), lambda: self._look(table)[0]), self._application(table))

    def _turn(self, table: TableName) -> threading.Lock:
        """Whose it is commits to the table: an epoch, or, for some milliseconds between two of them, what is done for the table."""
        return self._turns.setdefault(table, threading.Lock())

    def _check_empty(self, table: TableName) -> None:
        """A snapshot goes into a table that counts as no copy yet; added to one that does, every row would be there twice."""
        if load_applied(self.path(table), self._application(table)) is not None:
            raise TableRewrittenError(f"{self.path(table)} has been filled by somebody else meanwhile; the snapshot starts again")

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        check_changes(target, self._mode_of(target.table), changes, str(self.path(target.table)))
        schema = next(iter(changes.schemas), None)
        # What a table becomes for them, it becomes with all of them.
        ends = [end] if changes.at_once or changes.evolution is not None else self.steps(changes.slices, end)
        with self._turn(target.table):
            for upto in ends:
                self._apply(target, replace(changes, slices=slices_upto(changes.slices, upto)), schema, upto)

    @override
    def steps(self, slices: Sequence[FileSlice], end: Position) -> list[Position]:
        return step_ends(slices, _ROWS_A_STEP, end)

    def _apply(self, target: Target, changes: TableChanges, schema: TableSchema | None, end: Position) -> None:
        for _ in range(ATTEMPTS):
            state, applied = self._look(target.table)
            reached = self._checked_position(target, applied)
            if reached >= end:
                return
            if self._advance(target, replace(changes, slices=slices_after(changes.slices, reached)), schema, state, end):
                self._check_reached(target.table, end)
                return
        raise SinkError(f"others commit to {self.path(target.table)} faster than an epoch can be worked out")

    def _look(self, table: TableName) -> tuple[DeltaState | None, Position | None]:
        return self._writer.look(self.path(table), self._application(table))

    @override
    def can_evolve(self, target: Target, evolution: Evolution) -> bool:
        state, _ = self._look(target.table)
        try:
            if state is None:
                return False
            check_writable(state)
            evolve_state(state, evolution, target.mode, {})
        except Unsupported:
            return False
        return can_delete(state)

    def _advance(self, target: Target, changes: TableChanges, schema: TableSchema | None, state: DeltaState | None, end: Position) -> bool:
        """Bring the table to `end`. False: somebody else committed meanwhile, and nothing is done."""
        path, application = self.path(target.table), self._application(target.table)
        layout = Layout(target.schema, target.key, target.mode)
        try:
            if state is None:
                raise Unsupported("its log is of a kind that is not known")
            if not is_as_begun(state.metadata, layout, target.source_oid):
                raise SchemaChangedError(
                    f"{path} has other columns, or is made from another table, than {target.table} when the run began",
                    hint=f"penstock tables resync {target.table}, or remove {path} and run again to copy the table anew",
                )
            is_ours = self._writer.apply(self._epoch(target, changes, state, end))
            self._slow.pop(target.table, None)
            return is_ours
        except Unsupported as reason:
            is_plain = changes.evolution is None and (schema is None or schema.column_names == tuple(target.schema.names))
            self._leave_to_delta(target.table, layout, reason, is_plain=is_plain)
        if schema is not None and changes.slices:
            self._merge(target, schema, changes.slices, end, None if state is None else state.version)
        else:
            record_position(path, application, end)
        return True

    def _epoch(self, target: Target, changes: TableChanges, state: DeltaState, end: Position) -> DeltaEpoch:
        path, application, evolution = self.path(target.table), self._application(target.table), changes.evolution
        if evolution is None:
            layout = Layout(target.schema, target.key, target.mode)
            return DeltaEpoch(path, application, layout, state, end, changes.slices, views=changes.views)
        layout = Layout(evolution.columns, evolution.key, target.mode)
        properties = table_properties(self._pipeline, layout, target.source_oid, evolution.origin)
        evolved = evolve_state(state, evolution, target.mode, {name: properties[name] for name in (KEY, ORIGIN)})
        return DeltaEpoch(
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

    def _leave_to_delta(self, table: TableName, layout: Layout, reason: Unsupported, *, is_plain: bool = True) -> None:
        """What Delta's own MERGE can do is a mirror with a key, of just the columns that the changes have; anything else must be said."""
        if layout.mode is not Mode.MIRROR or not layout.key or not is_plain:
            raise SinkRefusedError(
                f"{self.path(table)} cannot be written to: {reason}",
                hint=f"take that out of the table, or remove {self.path(table)} and run again to copy it anew",
            )
        warning = SlowTableError(
            f"{self.path(table)} is written by MERGE, about {_MERGE_COST} times slower than by our own commits, because {reason}",
            hint=f"drop the feature or property (ALTER TABLE … DROP FEATURE), or remove {self.path(table)} to copy the table again",
        )
        known = self._slow.get(table)
        if known is None or known.message != warning.message:
            _log.warning("table is written by MERGE", extra={"table": str(table), "reason": str(reason), "times_slower": _MERGE_COST})
        self._slow[table] = warning

    @override
    def slowed(self, table: TableName) -> PenstockError | None:
        return self._slow.get(table)

    @override
    def find_refused(self, target: Target, changes: TableChanges, end: Position) -> dict[tuple[int, int], str]:
        state, applied = self._look(target.table)
        slices, path = slices_after(changes.slices, applied or Position.ZERO), self.path(target.table)
        if state is None or not slices:
            return {}
        session = self._transaction(target.table, end)
        read = self._load(session, target, changes.schemas[0], slices)
        with failing(path, "looking for changes that are refused by"):
            return find_refused(session, str(path), target, read, counts=_counts(slices), metadata=state.metadata)

    def _load(self, session: SparkSession, target: Target, schema: TableSchema, slices: Sequence[FileSlice]) -> DataFrame:
        try:
            return load_changes(session, schema, slices)
        except AnalysisException as error:
            raise SinkError(f"the spooled changes of {target.table} cannot be read: {first_line(error)}") from error

    def _merge(self, target: Target, schema: TableSchema, slices: Sequence[FileSlice], end: Position, version: int | None) -> None:
        session, path, counts = self._transaction(target.table, end), self.path(target.table), _counts(slices)
        changes = self._load(session, target, schema, slices)
        # A MERGE by key comes to the same whatever of it the table has already.
        is_repeatable = not counts.unchanged and (counts.updates or counts.deletes or counts.moves or counts.truncates)
        if version is not None and not is_repeatable:
            changes = unless_moved(changes, path, self._application(target.table), version)
        with failing(path, "applying changes to"):
            merge_changes(session, str(path), target, changes, counts, may_append=version is not None)

    def _check_reached(self, table: TableName, position: Position) -> None:
        if self._look(table)[1] != position:
            raise SinkError(f"{self.path(table)} is not at {position}, though nothing reported an error")
        self._remember(table, position)

    def _transaction(self, table: TableName, position: Position) -> SparkSession:
        """The table's session, set to write `position` with whatever is written next."""
        return self._sessions.at(self._application(table), position)

    def _checked_position(self, target: Target, applied: Position | None) -> Position:
        """How far the table is, by its own word, which must not be less than it was."""
        known = max(self._reached.get(target.table, Position.ZERO), target.applied or Position.ZERO)
        if applied is None or applied < known:
            raise rewound(str(self.path(target.table)), target.table, applied, known)
        return applied

    def _remember(self, table: TableName, position: Position | None) -> None:
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
