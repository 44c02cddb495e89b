"""`ParquetSink`: change logs as plain Parquet files, one directory per table, readable by any engine.

A log is append-only. An epoch is written to a hidden directory. Renaming this directory to a name that
contains the position commits data and position together. The chunks of a snapshot, whose rows are changes of
type `snapshot`, are in one such directory, named after the fence. The applied position is the greatest
position in the directory names.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from typing_extensions import override

from penstock import storage
from penstock.errors import (
    SchemaChangedError,
    SinkError,
    SinkRefusedError,
    TableRewrittenError,
    TargetRewoundError,
)
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import (
    SHADOWS,
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
from penstock.sinks.executors import Executors, are_light
from penstock.sinks.modes import Layout
from penstock.sinks.parquet.files import EpochTask, RepairTask, repair_chunk, write_epoch, write_snapshot
from penstock.sinks.parquet.targets import (
    MODE,
    POSITION,
    LogTable,
    ParquetTargets,
    load_positions,
    load_table,
    position_directory,
    save_table,
)
from penstock.sinks.slice_reader import slices_after

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_HIDDEN = "."
_SHAPE = "shape.parquet"


class ParquetSink(ParquetTargets, Sink):
    def __init__(
        self, executors: Executors, root: Path, pipeline: str, spark: SparkSession | None = None
    ) -> None:
        """`spark` is needed only by `read`."""
        super().__init__(root, pipeline)
        self._executors = executors
        self._spark = spark
        self._reached: dict[TableName, Position] = {}

    @property
    @override
    def chunk_writer(self) -> ChunkWriter:
        return write_snapshot

    @override
    def load_target(self, table: TableName) -> Target | None:
        target = super().load_target(table)
        self._remember(table, target.applied if target is not None else None)
        return target

    # snapshots
    # --------------------------------------------------------------------------------------------------------

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        """Remove the existing log: a new snapshot starts a new log."""
        path = self.path(schema.name)
        self.load_target(schema.name)
        begun = LogTable.of(self._pipeline, schema, f"{_HIDDEN}snapshot-{secrets.token_hex(8)}")
        layout = _layout(begun)
        copy = path / begun.copy
        storage.ensure_directory(path, shared=True)
        save_table(path, replace(begun, counts=False))
        _remove(path, lambda name: name.startswith((_HIDDEN, POSITION)))
        storage.ensure_directory(copy, shared=True)
        # A file without rows, from which readers of a log without changes learn its columns.
        pq.write_table(layout.schema.empty_table(), copy / _SHAPE)
        storage.sync_file(copy / _SHAPE)
        storage.sync_directories([copy, path, *path.parents[:2]])
        save_table(path, begun)
        self._remember(schema.name, None)
        return SnapshotPlace(str(copy), layout.schema, "snapshot")

    @override
    def can_resume_snapshot(
        self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]
    ) -> bool:
        path, target = self.path(schema.name), self.load_target(schema.name)
        found = load_table(path)
        if target is None or target.applied is not None or found is None or not found.counts:
            return False
        if place.directory != str(path / found.copy) or not found.is_of(schema):
            return False
        sizes = {
            entry.name: storage.size_bytes(entry)
            for entry in storage.list_paths(path / found.copy, "*.parquet")
        }
        return _SHAPE in sizes and all(sizes.get(file.name) == file.bytes for file in files if file.rows)

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        self._publish_copy(schema.name, self._copy(schema), files, fence)

    @override
    def repair_snapshot(
        self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position
    ) -> None:
        copy = self._copy(schema)
        # Repaired chunks get new file names, because a failed attempt must not change the original files.
        layout = _layout(LogTable.of(self._pipeline, schema, copy.name))
        place = SnapshotPlace(str(copy), layout.schema, f"repaired-{fence.value:016X}")
        chunks: list[str | None] = [*(file.name for file in files if file.rows), None]
        tasks = [
            RepairTask(place, index, chunk, schema.key, changed, fence) for index, chunk in enumerate(chunks)
        ]
        self._publish_copy(schema.name, copy, self._executors.run(repair_chunk, tasks), fence)

    def _copy(self, schema: TableSchema) -> Path:
        """The directory of an unfinished snapshot. Raises `TableRewrittenError` if another writer has
        finished or removed the snapshot.
        """
        path = self.path(schema.name)
        found = load_table(path)
        if (
            found is None
            or found.pipeline != self._pipeline
            or not found.counts
            or not storage.is_directory(path / found.copy)
        ):
            raise TableRewrittenError(
                f"{path} was filled or removed by another writer; the snapshot starts again"
            )
        return path / found.copy

    def _publish_copy(
        self, table: TableName, copy: Path, files: Sequence[SnapshotFile], fence: Position
    ) -> None:
        """Publish the snapshot without the files of failed attempts to write chunks."""
        wanted = {_SHAPE, *(file.name for file in files if file.rows)}
        with _failing(copy.parent):
            _remove(copy, lambda name: name not in wanted)
            _publish(copy, fence)
        self._remember(table, fence)

    # creating and removing tables
    # ------------------------------------------------------------------------------------------------------

    @override
    def drop(self, table: TableName) -> None:
        self.load_target(table)
        storage.delete_tree(self.path(table))
        self._remember(table, None)

    @override
    def remove_foreign(self, table: TableName) -> None:
        storage.delete_tree(self.path(table))
        self._remember(table, None)

    @override
    def release_ownership(self, table: TableName) -> None:
        found = load_table(self.path(table))
        if found is not None:
            save_table(self.path(table), replace(found, counts=False))
        self._remember(table, None)

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        """Replace the directory of the table by that of the resynced copy. Between the two renames, the table
        does not exist for a moment.

        The first rename moves the old directory beside the resynced copy, where it is then deleted. If the
        process ends before that, the next run deletes it.
        """
        path = self.path(table)
        if (
            not isinstance(shadow, ParquetSink)
            or self.load_target(table) is None
            or shadow.load_target(table) is None
        ):
            raise irreplaceable_error(path)
        other = shadow.path(table)
        if load_positions(other)[-1] < position:
            self._add(other, position, None)
        old = other.with_name(f"{_HIDDEN}{other.name}-{secrets.token_hex(8)}")
        storage.rename(path, old)
        storage.rename(other, path)
        storage.sync_directory(path.parent)
        storage.delete_tree(old)
        self._remember(table, position)

    @override
    def shadow(self, copy: str) -> Sink:
        return ParquetSink(
            self._executors, self._root / SHADOWS / self._pipeline / copy, self._pipeline, self._spark
        )

    @override
    def drop_shadows(self) -> None:
        storage.discard_tree(self._root / SHADOWS / self._pipeline)

    @override
    def version_at(self, table: TableName, position: Position) -> int | None:
        return max(
            (each.value for each in load_positions(self.path(table)) if each <= position), default=None
        )

    @override
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        path, found = self.path(table), load_table(self.path(table))
        if self._spark is None or found is None:
            raise TargetRewoundError(
                f"{path} no longer exists", hint="restart the pipeline to copy the table again"
            )
        wanted = [each for each in load_positions(path) if version is None or each.value <= version]
        files = [
            str(file)
            for each in wanted
            for file in storage.list_paths(position_directory(path, each), "*.parquet")
        ]
        struct = from_arrow_schema(_layout(found).schema, prefer_timestamp_ntz=True)
        return self._spark.read.schema(struct).parquet(*files)

    # epochs
    # --------------------------------------------------------------------------------------------------------

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        path = self.path(target.table)
        applied = self._checked_position(target)
        found = load_table(path)
        assert found is not None
        for schema in changes.schemas:
            if schema not in changes.views and not found.is_of(schema):
                raise SchemaChangedError(
                    f"table {target.table} changed its columns, its key or its identity, and the target "
                    "cannot follow that",
                    hint=f"remove {path} and restart the pipeline to copy the table again",
                )
        if applied < end:
            slices = tuple(slices_after(changes.slices, applied))
            layout = _layout(found)
            with _failing(path):
                self._add(
                    path,
                    end,
                    (lambda directory: EpochTask(directory, layout, slices, changes.views))
                    if slices
                    else None,
                )
            self._remember(target.table, end)

    def _add(self, path: Path, end: Position, task: Callable[[str], EpochTask] | None) -> None:
        """Write the changes of an epoch to a hidden directory, then publish it."""
        _remove(path, lambda name: name.startswith(_HIDDEN))
        directory = path / f"{_HIDDEN}epoch-{secrets.token_hex(8)}"
        storage.ensure_directory(directory, shared=True)
        tasks = [] if task is None else [task(str(directory))]
        light = all(are_light(each.slices) for each in tasks)
        written = self._executors.run(write_epoch, tasks, light=light) if tasks else []
        # Remove files of failed or abandoned attempts.
        wanted = {file.name for file in written if file.rows}
        _remove(directory, lambda name: name not in wanted)
        _publish(directory, end)

    def _checked_position(self, target: Target) -> Position:
        """The position stored in the table's directory. Raises if it is lower than a position that was read
        before.
        """
        path = self.path(target.table)
        now = super().load_target(target.table)
        known = max(self._reached.get(target.table, Position.ZERO), target.applied or Position.ZERO)
        if now is None or now.applied is None or now.applied < known:
            raise rewound_error(str(path), target.table, None if now is None else now.applied, known)
        return now.applied

    def _remember(self, table: TableName, position: Position | None) -> None:
        if position is None:
            self._reached.pop(table, None)
        else:
            self._reached[table] = position


@contextmanager
def _failing(path: Path) -> Iterator[None]:
    """Convert file errors to `SinkError`, which is retried: disk space may become available."""
    try:
        yield
    except OSError as error:
        raise SinkError(f"cannot add to {path}: {error.strerror}") from error


def _publish(directory: Path, position: Position) -> None:
    """Commit: rename the hidden directory to its visible name, which sets the position."""
    storage.sync_directory(directory)
    storage.rename(directory, position_directory(directory.parent, position))
    storage.sync_directory(directory.parent)


def _layout(table: LogTable) -> Layout:
    if POSITION in table.columns.names:
        raise SinkRefusedError(
            f"the table has a column named {POSITION!r}, a name that the log reserves",
            hint="rename the column",
        )
    return Layout(table.columns, table.key, MODE)


def _remove(directory: Path, is_wanted: Callable[[str], bool]) -> None:
    for entry in storage.list_paths(directory):
        if is_wanted(entry.name):
            storage.delete_tree(entry) if storage.is_directory(entry) else storage.delete(entry)
