"""`IcebergSink`: targets as tables in an Iceberg catalog of Spark.

Each commit has the data and the position, which is in the summary of the Iceberg snapshot. It succeeds only
if the table has not changed since its position was read (`iceberg/catalog.py`). Repeated and older epochs are
detected before the commit. A snapshot of the source is one commit of files that executors wrote. An epoch is
one commit of a data file and an equality delete file, so its cost depends on the changes and not on the
table. An epoch of inserts is an append; one that empties the table is an overwrite. Equality deletes slow
down readers until maintenance rewrites the table (`iceberg/maintenance.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from typing_extensions import override

from penstock import storage
from penstock.change import ChangeCounts
from penstock.errors import PenstockError, SinkError, TableRewrittenError, TargetRewoundError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import (
    SCRATCH,
    SHADOWS,
    ChangedRows,
    Sink,
    SnapshotFile,
    SnapshotPlace,
    TableChanges,
    Target,
    check_changes,
    irreplaceable_error,
    rewound_error,
)
from penstock.sinks.dataframes import quoted
from penstock.sinks.evolution import Evolution
from penstock.sinks.executors import Executors, SparkExecutors
from penstock.sinks.iceberg.catalog import (
    IcebergCatalog,
    LoadedTable,
    NewFile,
    TableChange,
    TableMovedError,
    evolve_table,
    first_line,
    former_columns,
)
from penstock.sinks.iceberg.definition import (
    IcebergPlace,
    check_adoptable,
    check_columns,
    check_unchanged,
    definition,
    files_place,
    layout_of,
    snapshot_place,
    table_properties,
    target_layout,
)
from penstock.sinks.iceberg.epoch import EpochWriter, discard
from penstock.sinks.iceberg.maintenance import Maintainer, Maintenance
from penstock.sinks.iceberg.reader import EpochTarget, TableReader
from penstock.sinks.iceberg.schema import check_names, renamed_columns
from penstock.sinks.iceberg.state import (
    COPY,
    find_applied,
    find_version,
    identifier,
    identity_properties,
    owned_target,
)
from penstock.sinks.iceberg.swap import (
    TableSwap,
    align_columns,
    drop_namespace,
    link_files,
    remove_links,
    spark_errors,
)
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Layout, Mode, ModeOf, mirrored
from penstock.sinks.row_files import new_attempt, remove_attempt
from penstock.sinks.slice_reader import slices_after
from penstock.storage.temporary import is_case_sensitive

_FILES = "snapshot-*.parquet"
_FILL_ATTEMPTS = 5


class IcebergSink(Sink):
    """Iceberg tables of one pipeline. A table whose mode differs from `mode_of` is rejected."""

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
        """`original`: for a sink of shadows, the sink of the tables that the shadows will replace."""
        self._original = original
        self._spark = spark
        self._place = place
        self._pipeline = pipeline
        self._mode_of = mode_of
        self._catalog = IcebergCatalog(spark, place.catalog, place.warehouse)
        self._executors = executors or SparkExecutors(spark)
        self._reader = TableReader(spark, place.catalog, self._executors)
        self._writer = EpochWriter(self._reader, self._executors, place.warehouse / SCRATCH / pipeline)
        self._reached: dict[TableName, Position] = {}
        self._maintainers: dict[TableName, Maintainer] = {}
        self._commit_locks: dict[TableName, Lock] = {}
        """The lock of each table. It is held during a commit, so that rewrites and epochs do not conflict."""

    def identifier(self, table: TableName) -> tuple[str, ...]:
        return identifier(self._place.namespace, table)

    def sql_name(self, table: TableName) -> str:
        return ".".join(quoted(part) for part in (self._place.catalog, *self.identifier(table)))

    # --- state ----------------------------------------------------------------------------------------------

    @override
    def describe(self, table: TableName) -> str:
        return ".".join((self._place.catalog, *self.identifier(table)))

    @override
    def are_distinct(self, one: TableName, other: TableName) -> bool:
        return is_case_sensitive(self._place.warehouse)

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
        return rows.withColumnsRenamed(
            {stored: name for name, stored in renamed_columns(self._mode_of(table)).items()}
        )

    @override
    def read_small(self, table: TableName, version: int | None, limit_bytes: int) -> pa.Table | None:
        loaded = self._catalog.load(self.identifier(table))
        return (
            None
            if loaded is None or loaded.problem is not None
            else self._reader.read_small(loaded, version, limit_bytes)
        )

    def _target(self, table: TableName, loaded: LoadedTable) -> Target:
        """The state of a loaded table. Raises `TargetForeignError` if this pipeline does not own the table.
        This check comes before the checks for other problems with the table.
        """
        applied = find_applied(loaded.ancestors(), loaded.properties)
        target = owned_target(table, self.describe(table), self._pipeline, loaded.properties, applied)
        if loaded.problem is not None:
            raise loaded.problem
        return target

    def _loaded(self, table: TableName) -> LoadedTable:
        loaded = self._catalog.load(self.identifier(table))
        if loaded is None:
            raise TargetRewoundError(
                f"{self.describe(table)} no longer exists",
                hint="restart the pipeline to copy the table again",
            )
        return loaded

    def _remember(self, table: TableName, position: Position | None) -> None:
        if position is None:
            self._reached.pop(table, None)
        else:
            self._reached[table] = position

    # --- snapshots ------------------------------------------------------------------------------------------

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        former = self._catalog.load(self.identifier(schema.name))
        if former is not None:
            self._target(schema.name, former)  # raises if the table is not this pipeline's
        storage.ensure_directory(self._place.warehouse, shared=True)
        layout = layout_of(schema, self._mode_of(schema.name))
        check_names(layout, self.describe(schema.name))
        identity = identity_properties(self._pipeline, layout, schema.oid, Origin.of(schema))
        # A replaced table has no current snapshot, and so no position.
        self._define(
            schema.name,
            definition(
                layout, table_properties(self._place, former, {**identity, COPY: secrets.token_hex(8)})
            ),
        )
        self._remember(schema.name, None)
        self._align(schema.name)
        loaded = self._loaded(schema.name)
        storage.ensure_directory(loaded.directory, shared=True)
        self._remove_leftovers(schema.name, loaded, ())
        return snapshot_place(loaded, layout, fence)

    def _align(self, table: TableName) -> None:
        original = None if self._original is None else self._catalog.load(self._original.identifier(table))
        if original is not None:
            align_columns(self._catalog, self._loaded(table), original)

    def _define(self, table: TableName, definition: str) -> None:
        levels = self.identifier(table)[:-1]
        with spark_errors(
            f"creating {self.describe(table)}",
            "fix the cause in the message, or drop the table to have it copied again",
        ):
            for depth in range(len(levels)):
                namespace = ".".join(quoted(part) for part in (self._place.catalog, *levels[: depth + 1]))
                self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")
            self._spark.sql(f"CREATE OR REPLACE TABLE {self.sql_name(table)} {definition}")

    @override
    def can_resume_snapshot(
        self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]
    ) -> bool:
        loaded = self._catalog.load(self.identifier(schema.name))
        if loaded is None:
            return False
        target = self._target(schema.name, loaded)
        is_begun = (
            target.applied is None
            and target.source_oid == schema.oid
            and target.mode is self._mode_of(schema.name)
        )
        if not is_begun or place.directory != str(loaded.directory):
            return False
        found = {
            entry.name: storage.size_bytes(entry)
            for entry in storage.list_paths(loaded.directory, f"{place.prefix}-*.parquet")
        }
        same = place.schema.equals(loaded.schema, check_metadata=True)
        return same and all(found.get(file.name) == file.bytes for file in files if file.rows)

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        self._fill(schema.name, files, fence)
        self._remember(schema.name, fence)

    def _fill(self, table: TableName, files: Sequence[SnapshotFile], position: Position) -> None:
        """Make `files` the content of the table, which must have no position, so that no other writer's rows
        are lost.

        If another writer commits first, for example a property or comment, the commit is retried with the
        same files.
        """
        new = [NewFile(file.name, file.rows, file.bytes) for file in files if file.rows]
        for _ in range(_FILL_ATTEMPTS):
            loaded = self._loaded(table)
            if self._target(table, loaded).applied is not None:
                raise TableRewrittenError(
                    f"{self.describe(table)} was filled by another writer; the snapshot starts again"
                )
            with suppress(TableMovedError):
                self._catalog.commit(
                    loaded, TableChange(new, is_whole=loaded.delete_files is not None), position
                )
                self._remove_leftovers(table, loaded, [file.name for file in new])
                return
        raise SinkError(
            f"other writers commit to {self.describe(table)} faster than a snapshot can be added; retrying"
        )

    @override
    def repair_snapshot(
        self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position
    ) -> None:
        if not self._holds(schema.name, files):
            self._fill(schema.name, files, Position.ZERO)
        loaded = self._loaded(schema.name)
        layout = target_layout(self._target(schema.name, loaded))
        place = replace(snapshot_place(loaded, layout, fence), prefix=f"epoch-{fence.value:016X}")
        change = self._writer.repair(
            EpochTarget(self.sql_name(schema.name), layout, place, loaded=loaded), changed
        )
        self._commit(loaded, change, fence)
        self._remember(schema.name, fence)

    def _holds(self, table: TableName, files: Sequence[SnapshotFile]) -> bool:
        """Whether an earlier attempt has already added these files.

        They must not be added again: a file that one snapshot both removes and adds is deleted when older
        snapshots expire.
        """
        loaded = self._loaded(table)
        if loaded.delete_files != 0 or self._target(table, loaded).applied is not None:
            return False
        return self._file_names(table, "files") == {file.name for file in files if file.rows}

    def _remove_leftovers(self, table: TableName, loaded: LoadedTable, current: Sequence[str]) -> None:
        """Remove files of failed attempts to write chunks. Files in `current`, and files of older versions of
        the table, are kept.
        """
        found = {path.name: path for path in storage.list_paths(loaded.directory, _FILES)}
        if found.keys() <= set(current):
            return
        for name in found.keys() - self._file_names(table, "all_data_files") - set(current):
            storage.delete(found[name])

    def _file_names(self, table: TableName, metadata: str) -> set[str]:
        """Names of the files in one of the table's metadata tables."""
        self._spark.sql(f"REFRESH TABLE {self.sql_name(table)}")
        paths = self._spark.table(f"{self.sql_name(table)}.{metadata}").select("file_path").distinct()
        return {str(row["file_path"]).rpartition("/")[2] for row in paths.collect()}

    # --- epochs ---------------------------------------------------------------------------------------------

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        with self._commit_lock(target.table):
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
        check_unchanged(target, found, place)
        self._advance(target, loaded, replace(changes, slices=slices_after(changes.slices, applied)), end)
        self._remember(target.table, end)

    def _advance(self, target: Target, loaded: LoadedTable, changes: TableChanges, end: Position) -> None:
        layout, evolution, change = target_layout(target), changes.evolution, TableChange()
        attempt = new_attempt()
        prefix = f"epoch-{end.value:016X}-{attempt}"
        writes = EpochTarget(self.sql_name(target.table), layout, files_place(loaded, prefix), loaded=loaded)
        if evolution is not None:
            loaded = self._evolved(loaded, evolution, target.mode)
            layout = Layout(evolution.columns, evolution.key, target.mode)
            writes = replace(
                writes,
                layout=layout,
                place=files_place(loaded, prefix),
                past=former_columns(evolution, loaded.format_version),
            )
            change = replace(
                change,
                properties=identity_properties(self._pipeline, layout, target.source_oid, evolution.origin),
            )
        try:
            if changes.slices:
                counts = sum((slice.file.counts for slice in changes.slices), ChangeCounts())
                change = replace(
                    self._writer.write(writes, replace(changes, counts=counts)), properties=change.properties
                )
            if writes.past.is_rewritten and not change.is_whole:
                change = replace(change, rewritten=self._writer.rewrite(writes))
        except Exception:
            remove_attempt(loaded.directory, attempt)
            raise
        self._commit(loaded, change, end)

    @override
    def can_evolve(self, target: Target, evolution: Evolution) -> bool:
        if not target.key and any(added.fill.is_valid for added in evolution.added):
            return (
                False  # rows without key are looked up by all columns, and the new column does not exist yet
            )
        loaded = self._catalog.load(self.identifier(target.table))
        if loaded is None:
            return False
        found = self._target(target.table, loaded)
        if not found.schema.equals(target.schema):
            return bool(
                found.schema.equals(evolution.columns)
            )  # an earlier commit succeeded, but its reply was lost
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
        made = Maintainer(
            self._spark, self.sql_name(table), self._place.maintenance, self._commit_lock(table), self._merge
        )
        maintainer = self._maintainers.setdefault(table, made)
        loaded = self._catalog.load(self.identifier(table))
        if loaded is not None and loaded.problem is None and maintainer.is_due(loaded):
            maintainer.maintain(loaded)

    def _merge(self, loaded: LoadedTable, locations: Sequence[str]) -> Any | None:
        file = self._writer.merge(loaded, locations)
        return None if file is None else self._catalog.data_file(loaded, file)

    def _commit_lock(self, table: TableName) -> Lock:
        return self._commit_locks.setdefault(table, Lock())

    def _checked_position(self, target: Target, found: Target | None) -> Position:
        """The position stored in the table. Raises if it is lower than a position that was read before."""
        applied = None if found is None else found.applied
        known = max(self._reached.get(target.table, Position.ZERO), target.applied or Position.ZERO)
        if applied is None or applied < known:
            raise rewound_error(self.describe(target.table), target.table, applied, known)
        return applied

    # --- creating and removing tables -----------------------------------------------------------------------

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
        # Add a snapshot without a position, because that of another pipeline must not count for this one.
        properties = identity_properties(self._pipeline, layout, schema.oid, None)
        self._commit(loaded, TableChange(properties=properties), Position.ZERO)
        self._remember(schema.name, None)
        return True

    @override
    def release_ownership(self, table: TableName) -> None:
        loaded = self._catalog.load(self.identifier(table))
        if loaded is not None and self._target(table, loaded).applied is not None:
            self._commit(loaded, TableChange(), Position.ZERO)
        self._remember(table, None)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        found, former = shadow.load_target(table), self._catalog.load(self.identifier(table))
        if not isinstance(shadow, IcebergSink) or found is None or former is None:
            raise irreplaceable_error(self.describe(table))
        self._target(table, former)
        identity = identity_properties(self._pipeline, target_layout(found), found.source_oid, found.origin)
        properties = table_properties(self._place, former, {**identity, COPY: found.copy or ""})
        swap = TableSwap(
            self._catalog,
            partial(shadow._loaded, table),  # noqa: SLF001 - another sink of this class
            partial(self._loaded, table),
            self.describe(table),
        )
        with self._commit_lock(table):
            if not swap.commit(self._spark._jvm, properties, position):  # noqa: SLF001
                rows = shadow.read(table).withColumnsRenamed(renamed_columns(found.mode))
                swap.rewrite(rows, self.sql_name(table), properties, position)
        after = self.load_target(table)
        if after is None or after.applied != position:
            raise SinkError(
                f"{self.describe(table)} is not at {position}, although Iceberg reported no error"
            )

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

    @override
    def shadow(self, copy: str) -> Sink:
        place = replace(
            self._place,
            namespace=(*self._shadows(), copy),
            maintenance=Maintenance(delete_files=0, expire_every=0),
        )
        return IcebergSink(self._spark, place, self._pipeline, self._executors, self._mode_of, original=self)

    @override
    def drop_shadows(self) -> None:
        try:
            drop_namespace(self._spark, (self._place.catalog, *self._shadows()), self._forget_links)
        except (PySparkException, Py4JJavaError) as error:
            raise SinkError(f"cannot drop resync copies of earlier runs: {first_line(error)}") from error

    def _forget_links(self, namespace: Sequence[str], table: str) -> None:
        """Remove the hard links to the files of a shadow that an earlier run left, before the shadow is
        dropped. The shadow's name is `<shadows>.<copy>.<schema>.<table>`.
        """
        below = tuple(namespace)[len(self._shadows()) + 2 :]
        with suppress(PenstockError, OSError):  # an unreadable table is reported elsewhere
            self._remove_links((*namespace[1:], table), (*self._place.namespace, *below, table))

    def _shadows(self) -> tuple[str, ...]:
        return (*self._place.namespace, SHADOWS, self._pipeline)


def _moved(loaded: LoadedTable) -> SinkError:
    return SinkError(f"the table at {loaded.location} was changed by another writer; retrying")
