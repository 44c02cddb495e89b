"""`IcebergSink`: tables in an Iceberg catalog of Spark's.

Data and position commit together: the position stands in the summary of the snapshot that brings the rows, and the commit is made only
against the very table whose position was read (`iceberg/catalog.py`). A repeated or older epoch is found out before that. A snapshot of the
source is one commit of files that executors wrote. An epoch is one commit of a file of rows and a file of equality deletes, whose cost is
that of the changes, not of the table; an epoch of inserts is an append; one that empties the table is an overwrite. Reading such a table
costs more with each delete, until it is rewritten (`iceberg/maintenance.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from penstock.change import ChangeCounts
from penstock.errors import PenstockError, SinkError, TableRewrittenError, TargetRewoundError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import SHADOWS, ChangedRows, Sink, SnapshotFile, SnapshotPlace, TableChanges, Target, rewound
from penstock.sinks.directories import SCRATCH, tells_case_apart
from penstock.sinks.evolution import Evolution
from penstock.sinks.executors import Executors, SparkExecutors
from penstock.sinks.fitting import check_changes
from penstock.sinks.iceberg.catalog import IcebergCatalog, LoadedTable, NewFile, TableChange, TableMovedError, first_line
from penstock.sinks.iceberg.checks import check_adoptable, check_begun, check_columns
from penstock.sinks.iceberg.definition import (
    IcebergPlace,
    definition,
    files_place,
    layout_of,
    snapshot_place,
    table_properties,
    target_layout,
)
from penstock.sinks.iceberg.epoch import EpochWriter, discard
from penstock.sinks.iceberg.evolution import evolve_table, past_of
from penstock.sinks.iceberg.maintenance import Maintainer, Maintenance
from penstock.sinks.iceberg.names import IS_DELETED, check_names
from penstock.sinks.iceberg.reader import EpochTarget, LakeReader
from penstock.sinks.iceberg.shadows import (
    align_columns,
    by_spark,
    commented,
    drop_below,
    link_files,
    plan_swap,
    put_in_place,
    remove_links,
)
from penstock.sinks.iceberg.state import COPY, find_applied, find_version, identity_properties, owned_target
from penstock.sinks.iceberg.targets import identifier
from penstock.sinks.layout import DELETED, Layout, Mode
from penstock.sinks.names import quoted
from penstock.sinks.origin import Origin
from penstock.sinks.slices import slices_after

_FILES = "snapshot-*.parquet"
_FILL_ATTEMPTS = 5

ModeOf = Callable[[TableName], Mode]


def mirrored(_: TableName) -> Mode:
    return Mode.MIRROR


class IcebergSink(Sink):
    """`mode_of`: how each table is to be kept; a table that is there and is kept in another way is refused."""

    def __init__(
        self,
        spark: SparkSession,
        place: IcebergPlace,
        pipeline: str,
        executors: Executors | None = None,
        mode_of: ModeOf = mirrored,
        *,
        original: IcebergSink | None = None,
    ) -> None:
        """`original`: the sink of the tables whose place those of this sink are to take, if it is for shadows."""
        self._original = original
        self._spark = spark
        self._place = place
        self._pipeline = pipeline
        self._mode_of = mode_of
        self._catalog = IcebergCatalog(spark, place.catalog, place.warehouse)
        self._executors = executors or SparkExecutors(spark)
        self._reader = LakeReader(spark, place.catalog, self._executors)
        self._writer = EpochWriter(self._reader, self._executors, place.warehouse / SCRATCH / pipeline)
        self._reached: dict[TableName, Position] = {}
        self._maintainers: dict[TableName, Maintainer] = {}
        self._turns: dict[TableName, Lock] = {}
        """Held by whoever is about to commit to a table, so that a rewrite and the epochs do not undo each other's work."""

    def identifier(self, table: TableName) -> tuple[str, ...]:
        return identifier(self._place.namespace, table)

    def sql_name(self, table: TableName) -> str:
        return ".".join(quoted(part) for part in (self._place.catalog, *self.identifier(table)))

    # --- how it stands ---------------------------------------------------------------------------------------------------

    @override
    def describe(self, table: TableName) -> str:
        return ".".join((self._place.catalog, *self.identifier(table)))

    @override
    def tells_apart(self, one: TableName, other: TableName) -> bool:
        return tells_case_apart(self._place.warehouse)

    @override
    def load_target(self, table: TableName) -> Target | None:
        loaded = self._catalog.load(self.identifier(table))
        target = None if loaded is None else self._target(table, loaded)
        self._remember(table, target.applied if target is not None else None)
        return target

    @override
    def version_at(self, table: TableName, position: Position) -> int | None:
        loaded = self._catalog.load(self.identifier(table))
        return None if loaded is None else find_version(loaded.ancestors(), loaded.properties, position)

    @override
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        name = self.sql_name(table)
        self._spark.sql(f"REFRESH TABLE {name}")
        reader = self._spark.read if version is None else self._spark.read.option("versionAsOf", version)
        rows = reader.table(name)
        return rows if self._mode_of(table) is not Mode.SOFT_DELETE else rows.withColumnRenamed(IS_DELETED, DELETED)

    @override
    def read_small(self, table: TableName, version: int | None, limit_bytes: int) -> pa.Table | None:
        loaded = self._catalog.load(self.identifier(table))
        return None if loaded is None or loaded.problem is not None else self._reader.read_small(loaded, version, limit_bytes)

    def _target(self, table: TableName, loaded: LoadedTable) -> Target:
        """What is another's is refused as such, whatever else is wrong with it."""
        applied = find_applied(loaded.ancestors(), loaded.properties)
        target = owned_target(table, self.describe(table), self._pipeline, loaded.properties, applied)
        if loaded.problem is not None:
            raise loaded.problem
        return target

    def _loaded(self, table: TableName) -> LoadedTable:
        loaded = self._catalog.load(self.identifier(table))
        if loaded is None:
            raise TargetRewoundError(f"{self.describe(table)} is gone", hint="restart the pipeline to copy the table anew")
        return loaded

    def _remember(self, table: TableName, position: Position | None) -> None:
        if position is None:
            self._reached.pop(table, None)
        else:
            self._reached[table] = position

    # --- snapshots -------------------------------------------------------------------------------------------------------

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        former = self._catalog.load(self.identifier(schema.name))
        if former is not None:
            self._target(schema.name, former)  # what is another's is refused
        self._place.warehouse.mkdir(parents=True, exist_ok=True)
        layout = layout_of(schema, self._mode_of(schema.name))
        check_names(layout, self.describe(schema.name))
        identity = identity_properties(self._pipeline, layout, schema.oid, Origin.of(schema))
        # A replaced table has no current snapshot, and so no position.
        self._define(schema.name, definition(layout, table_properties(self._place, former, {**identity, COPY: secrets.token_hex(8)})))
        self._remember(schema.name, None)
        self._align(schema.name)
        loaded = self._loaded(schema.name)
        loaded.directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers(schema.name, loaded, ())
        return snapshot_place(loaded, layout, fence)

    def _align(self, table: TableName) -> None:
        original = None if self._original is None else self._catalog.load(self._original.identifier(table))
        if original is not None:
            align_columns(self._catalog, self._loaded(table), original)

    def _define(self, table: TableName, definition: str) -> None:
        levels = self.identifier(table)[:-1]
        with by_spark(f"creating {self.describe(table)}", "look at the message; dropping the table copies it anew"):
            for depth in range(len(levels)):
                namespace = ".".join(quoted(part) for part in (self._place.catalog, *levels[: depth + 1]))
                self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")
            self._spark.sql(f"CREATE OR REPLACE TABLE {self.sql_name(table)} {definition}")

    @override
    def can_resume_snapshot(self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]) -> bool:
        loaded = self._catalog.load(self.identifier(schema.name))
        if loaded is None:
            return False
        target = self._target(schema.name, loaded)
        is_begun = target.applied is None and target.source_oid == schema.oid and target.mode is self._mode_of(schema.name)
        if not is_begun or place.directory != str(loaded.directory):
            return False
        found = {entry.name: entry.stat().st_size for entry in loaded.directory.glob(f"{place.prefix}-*.parquet")}
        same = place.schema.equals(loaded.schema, check_metadata=True)
        return same and all(found.get(file.name) == file.bytes for file in files if file.rows)

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        self._fill(schema.name, files, fence)
        self._remember(schema.name, fence)

    def _fill(self, table: TableName, files: Sequence[SnapshotFile], position: Position) -> None:
        """Make the table exactly `files`. It must count as no copy yet: somebody else's rows are not to be lost.

        Whoever gets in between with something else, a property or a comment, costs another commit, and never the files.
        """
        new = [NewFile(file.name, file.rows, file.bytes) for file in files if file.rows]
        for _ in range(_FILL_ATTEMPTS):
            loaded = self._loaded(table)
            if self._target(table, loaded).applied is not None:
                raise TableRewrittenError(f"{self.describe(table)} has been filled by somebody else meanwhile; the snapshot starts again")
            with suppress(TableMovedError):
                self._catalog.commit(loaded, TableChange(new, is_whole=loaded.delete_files is not None), position)
                self._remove_leftovers(table, loaded, [file.name for file in new])
                return
        raise SinkError(f"others commit to {self.describe(table)} faster than a copy can be put in; it is tried again")

    @override
    def repair_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position) -> None:
        if not self._holds(schema.name, files):
            self._fill(schema.name, files, Position.ZERO)
        loaded = self._loaded(schema.name)
        layout = target_layout(self._target(schema.name, loaded))
        place = replace(snapshot_place(loaded, layout, fence), prefix=f"epoch-{fence.value:016X}")
        change = self._writer.repair(EpochTarget(self.sql_name(schema.name), layout, place, loaded=loaded), changed)
        self._commit(loaded, change, fence)
        self._remember(schema.name, fence)

    def _holds(self, table: TableName, files: Sequence[SnapshotFile]) -> bool:
        """Whether an attempt that did not get to its end has put these files in already.

        They must not be put in once more: a file that one snapshot both drops and adds is removed when older snapshots expire.
        """
        loaded = self._loaded(table)
        if loaded.delete_files != 0 or self._target(table, loaded).applied is not None:
            return False
        self._spark.sql(f"REFRESH TABLE {self.sql_name(table)}")
        rows = self._spark.table(f"{self.sql_name(table)}.files").select("file_path").collect()
        return {str(row["file_path"]).rpartition("/")[2] for row in rows} == {file.name for file in files if file.rows}

    def _remove_leftovers(self, table: TableName, loaded: LoadedTable, current: Sequence[str]) -> None:
        """What attempts at chunks left that did not get to their end. Older versions of the table have files too."""
        found = {path.name: path for path in loaded.directory.glob(_FILES)}
        if found.keys() <= set(current):
            return
        self._spark.sql(f"REFRESH TABLE {self.sql_name(table)}")
        rows = self._spark.table(f"{self.sql_name(table)}.all_data_files").select("file_path").distinct().collect()
        held = {str(row["file_path"]).rpartition("/")[2] for row in rows}
        for name in found.keys() - held - set(current):
            found[name].unlink(missing_ok=True)

    # --- epochs ----------------------------------------------------------------------------------------------------------

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        with self._turn(target.table):
            self._apply(target, changes, end)

    def _apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        loaded = self._catalog.load(self.identifier(target.table))
        found = None if loaded is None else self._target(target.table, loaded)
        place = self.describe(target.table)
        check_changes(found or target, self._mode_of(target.table), changes, place)
        if found is not None and loaded is not None:
            check_columns(found, loaded, place)
        applied = self._checked_position(target, found)
        if loaded is None or found is None or applied >= end:
            return
        check_begun(target, found, place)
        self._advance(target, loaded, replace(changes, slices=slices_after(changes.slices, applied)), end)
        self._remember(target.table, end)

    def _advance(self, target: Target, loaded: LoadedTable, changes: TableChanges, end: Position) -> None:
        layout, prefix, evolution, change = target_layout(target), f"epoch-{end.value:016X}", changes.evolution, TableChange()
        writes = EpochTarget(self.sql_name(target.table), layout, files_place(loaded, prefix), loaded=loaded)
        if evolution is not None:
            loaded = self._evolved(loaded, evolution, target.mode)
            layout = Layout(evolution.columns, evolution.key, target.mode)
            writes = replace(writes, layout=layout, place=files_place(loaded, prefix), past=past_of(evolution, loaded.format_version))
            change = replace(change, properties=identity_properties(self._pipeline, layout, target.source_oid, evolution.origin))
        if changes.slices:
            counts = sum((slice.file.counts for slice in changes.slices), ChangeCounts())
            change = replace(self._writer.write(writes, replace(changes, counts=counts)), properties=change.properties)
        if writes.past.is_rewritten and not change.is_whole:
            change = replace(change, rewritten=self._writer.rewrite(writes))
        self._commit(loaded, change, end)

    @override
    def can_evolve(self, target: Target, evolution: Evolution) -> bool:
        if not target.key and any(added.fill.is_valid for added in evolution.added):
            return False  # rows without key are looked for by all that they have, and the new column is not there yet
        loaded = self._catalog.load(self.identifier(target.table))
        if loaded is None:
            return False
        found = self._target(target.table, loaded)
        if not found.schema.equals(target.schema):
            return bool(found.schema.equals(evolution.columns))  # it did, and the answer was lost
        try:
            check_names(Layout(evolution.columns, evolution.key, target.mode), self.describe(target.table))
            return bool(self._evolved(loaded, evolution, target.mode))
        except (SinkError, ValueError):
            return False

    def _evolved(self, loaded: LoadedTable, evolution: Evolution, mode: Mode) -> LoadedTable:
        try:
            return evolve_table(self._catalog, loaded, evolution, mode)
        except TableMovedError as error:
            raise _moved(loaded) from error

    def _commit(self, loaded: LoadedTable, change: TableChange, position: Position) -> None:
        try:
            self._catalog.commit(loaded, change, position)
        except TableMovedError as error:
            discard(files_place(loaded, ""), change)
            raise _moved(loaded) from error

    @override
    def maintain(self, table: TableName) -> None:
        made = Maintainer(self._spark, self.sql_name(table), self._place.maintenance, self._turn(table), self._merge)
        maintainer = self._maintainers.setdefault(table, made)
        loaded = self._catalog.load(self.identifier(table))
        if loaded is not None and loaded.problem is None and maintainer.is_due(loaded):
            maintainer.keep(loaded)

    def _merge(self, loaded: LoadedTable, locations: Sequence[str]) -> Any | None:
        file = self._writer.merge(loaded, locations)
        return None if file is None else self._catalog.data_file(loaded, file)

    def _turn(self, table: TableName) -> Lock:
        return self._turns.setdefault(table, Lock())

    def _checked_position(self, target: Target, found: Target | None) -> Position:
        """How far the table is, by its own word, which must not be less than it was."""
        applied = None if found is None else found.applied
        known = max(self._reached.get(target.table, Position.ZERO), target.applied or Position.ZERO)
        if applied is None or applied < known:
            raise rewound(self.describe(target.table), target.table, applied, known)
        return applied

    # --- tables as a whole -----------------------------------------------------------------------------------------------

    @override
    def drop(self, table: TableName) -> None:
        self._catalog.drop(self.identifier(table))
        self._remember(table, None)

    @override
    def adopt(self, schema: TableSchema) -> bool:
        layout, place = layout_of(schema, self._mode_of(schema.name)), self.describe(schema.name)
        loaded = self._loaded(schema.name)
        check_names(layout, place)
        check_adoptable(loaded, layout, place)
        # A commit of ours on top: whatever position another pipeline has written down there, it is not this one's.
        properties = identity_properties(self._pipeline, layout, schema.oid, None)
        self._commit(loaded, TableChange(properties=properties), Position.ZERO)
        self._remember(schema.name, None)
        return True

    @override
    def disown(self, table: TableName) -> None:
        loaded = self._catalog.load(self.identifier(table))
        if loaded is not None and self._target(table, loaded).applied is not None:
            self._commit(loaded, TableChange(), Position.ZERO)
        self._remember(table, None)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        found, former = shadow.load_target(table), self._catalog.load(self.identifier(table))
        if not isinstance(shadow, IcebergSink) or found is None or former is None:
            raise TargetRewoundError(
                f"{self.describe(table)} is gone, so nothing can take its place", hint="restart the pipeline to copy the table anew"
            )
        self._target(table, former)
        identity = identity_properties(self._pipeline, target_layout(found), found.source_oid, found.origin)
        properties = table_properties(self._place, former, {**identity, COPY: found.copy or ""})
        with self._turn(table):
            if not self._swap(table, shadow, properties, position):
                self._rewrite(table, shadow, found, properties, position)
        after = self.load_target(table)
        if after is None or after.applied != position:
            raise SinkError(f"{self.describe(table)} is not at {position}, though Iceberg reported no error")

    def _swap(self, table: TableName, shadow: IcebergSink, properties: Mapping[str, str], position: Position) -> bool:
        """One commit of metadata. False: it takes more than that."""
        for _ in range(_FILL_ATTEMPTS):
            former, found = self._loaded(table), shadow._loaded(table)
            link_files(found, former)
            content = plan_swap(self._spark._jvm, self._catalog, found, former)  # noqa: SLF001
            if content is None:
                return False
            with suppress(TableMovedError):
                self._catalog.swap(former, content, properties, position)
                return True
        raise SinkError(f"others commit to {self.describe(table)} faster than a copy can be put in its place")

    @override
    def prepare_replace(self, table: TableName, shadow: Sink) -> None:
        found = self._catalog.load(shadow.identifier(table)) if isinstance(shadow, IcebergSink) else None
        if found is not None:
            link_files(found, self._loaded(table))

    @override
    def cancel_replace(self, table: TableName, shadow: Sink) -> None:
        if isinstance(shadow, IcebergSink):
            self._remove_links(shadow.identifier(table), self.identifier(table))

    def _remove_links(self, shadow: Sequence[str], table: Sequence[str]) -> None:
        found, mine = self._catalog.load(shadow), self._catalog.load(table)
        if found is not None and mine is not None:
            remove_links(found, mine)

    def _rewrite(self, table: TableName, shadow: IcebergSink, found: Target, properties: Mapping[str, str], position: Position) -> None:
        """Have Spark write all rows again."""
        rows = shadow.read(table)
        rows = rows if found.mode is not Mode.SOFT_DELETE else rows.withColumnRenamed(DELETED, IS_DELETED)
        comments = self._catalog.comments(self._loaded(table))
        with by_spark(f"replacing {self.describe(table)}"):
            put_in_place(commented(rows, comments), self.sql_name(table), properties, position)
        self._catalog.save_position(self._loaded(table), position)

    @override
    def shadow(self, copy: str) -> Sink:
        place = replace(self._place, namespace=(*self._shadows(), copy), maintenance=Maintenance(delete_files=0, expire_every=0))
        return IcebergSink(self._spark, place, self._pipeline, self._executors, self._mode_of, original=self)

    @override
    def drop_shadows(self) -> None:
        try:
            drop_below(self._spark, (self._place.catalog, *self._shadows()), self._forget_links)
        except (PySparkException, Py4JJavaError) as error:
            raise SinkError(f"shadows of former runs cannot be dropped: {first_line(error)}") from error

    def _forget_links(self, namespace: Sequence[str], table: str) -> None:
        """Before a shadow is dropped that a former run left, `<shadows>.<copy>.<schema>.<table>`."""
        below = tuple(namespace)[len(self._shadows()) + 2 :]
        with suppress(PenstockError, OSError):  # of a table that cannot be read, which fails by itself
            self._remove_links((*namespace[1:], table), (*self._place.namespace, *below, table))

    def _shadows(self) -> tuple[str, ...]:
        return (*self._place.namespace, SHADOWS, self._pipeline)


def _moved(loaded: LoadedTable) -> SinkError:
    return SinkError(f"the table at {loaded.location} was changed by somebody else meanwhile; it is tried again")
