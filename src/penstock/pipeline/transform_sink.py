"""`TransformingSink`: a sink that transforms rows before the inner sink writes them.

Callers pass the schemas and rows of source tables. The inner sink gets the transformed schemas and rows.
Snapshot tasks transform a chunk while they write it. Changes, and rows that changed during a snapshot, are
first rewritten to transformed files (`transforms/staging.py`). `transforms/spark_exchange.py` evaluates
expressions that only Spark can evaluate. Rows of tables without a transform pass unchanged. Every pipeline
uses this sink, because a rule may be added while the pipeline runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock import storage
from penstock.change import ChangeCounts
from penstock.errors import (
    PenstockError,
    RowRefusedError,
    SchemaChangedError,
    SinkError,
    TableRewrittenError,
    ValuesMissingError,
)
from penstock.pipeline.dead_letters.snapshot_rejections import RejectedRowsFile
from penstock.pipeline.snapshots.executors import AskingSink, ChunkAsker
from penstock.pipeline.snapshots.task import RejectingWriter, write_file
from penstock.position import Position
from penstock.postgres.chunks import OnRejected
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import (
    ChangedRows,
    ChunkWriter,
    Sink,
    SnapshotFile,
    SnapshotPlace,
    TableChanges,
    Target,
)
from penstock.sinks.executors import Executors, SparkExecutors
from penstock.sinks.row_values import View
from penstock.spark.query_plan import answer
from penstock.spool.reader import FileSlice
from penstock.transforms.computed import spark_columns
from penstock.transforms.spark_exchange import Queries
from penstock.transforms.staging import (
    BatchTransform,
    KeysTask,
    StageTask,
    ask,
    ask_rows,
    needs_all_changes,
    plan_stages,
    restage,
    stage,
)
from penstock.transforms.transform import Fitted, Transform, is_made_by

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.sinks.evolution import Evolution


@dataclass(frozen=True, slots=True)
class SparkQueries(Queries):
    """Evaluates the Spark expressions of transforms. Several threads of the driver may use it at once."""

    spark: SparkSession

    @override
    def answer(self, fitted: Fitted, files: Sequence[str], directory: str) -> None:
        assert fitted.query is not None
        answer(self.spark, fitted.query.text, pa.schema(list(spark_columns(fitted.source))), files, directory)


TransformOf = Callable[[TableName], Transform | None]


class TransformingSink(Sink, AskingSink):
    def __init__(
        self,
        sink: Sink,
        transform_of: TransformOf,
        executors: Executors,
        directory: Path,
        queries: Queries | None = None,
    ) -> None:
        """`directory` holds transformed files until they are applied; executors must be able to access it.
        `queries` evaluates Spark expressions.
        """
        self._sink = sink
        self._transform_of = transform_of
        self._executors = executors
        self._directory = directory
        self._queries = queries

    @property
    def inner(self) -> Sink:
        """The sink that writes the transformed rows."""
        return self._sink

    # snapshots
    # --------------------------------------------------------------------------------------------------------

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        return self._sink.begin_snapshot(self._seen(schema), fence)

    @property
    @override
    def chunk_writer(self) -> ChunkWriter | None:
        return self._sink.chunk_writer

    @override
    def writer_for(self, schema: TableSchema) -> ChunkWriter | None:
        transform = self._transform_of(schema.name)
        writer = self._sink.writer_for(schema)
        return (
            writer
            if transform is None
            else _TransformingWriter(BatchTransform(transform.fit(schema)), writer or write_file)
        )

    @override
    def asker_for(self, schema: TableSchema) -> ChunkAsker | None:
        transform = self._transform_of(schema.name)
        fitted = None if transform is None else transform.fit(schema)
        if fitted is None or fitted.query is None:
            return None
        assert self._queries is not None
        return ChunkAsker(fitted, self._sink.writer_for(schema) or write_file, self._queries, self._directory)

    @override
    def can_resume_snapshot(
        self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]
    ) -> bool:
        """Whether the chunks of an earlier run can be used. This requires that they were written with the
        current transform.
        """
        transform, target = self._transform_of(schema.name), self._sink.load_target(schema.name)
        if target is None or not is_made_by(target, transform):
            return False
        return self._sink.can_resume_snapshot(self._seen(schema), place, files)

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        self._check_begun(schema)
        self._sink.finish_snapshot(self._seen(schema), files, fence)

    @override
    def repair_snapshot(
        self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position
    ) -> None:
        self._check_begun(schema)
        transform = self._transform_of(schema.name)
        if transform is not None and not changed.is_made:
            changed = self._restaged(transform.fit(schema), changed, restage)
        self._sink.repair_snapshot(self._seen(schema), files, changed, fence)

    @override
    def make_changed(self, schema: TableSchema, changed: ChangedRows) -> tuple[ChangedRows, Sequence[str]]:
        self._check_begun(schema)
        transform = self._transform_of(schema.name)
        if transform is None:
            return changed, ()
        made = self._restaged(transform.fit(schema), changed, _restage_diverting)
        return made, [str(path) for path in storage.list_paths(Path(made.keys).parent, "refused-*.parquet")]

    def _restaged(
        self, fitted: Fitted, changed: ChangedRows, by: Callable[[KeysTask], SnapshotFile]
    ) -> ChangedRows:
        directory = Path(changed.keys).parent / "transformed"
        storage.discard_tree(directory)
        keys, rows = directory / "keys", directory / "rows"
        for each in (directory, keys, rows):
            storage.ensure_directory(each)
        tasks = [
            *(
                KeysTask(str(path), fitted, str(keys), at, is_keys=True)
                for at, path in enumerate(storage.list_paths(Path(changed.keys), "*.parquet"))
            ),
            *(KeysTask(path, fitted, str(rows), at, is_keys=False) for at, path in enumerate(changed.rows)),
        ]
        if fitted.query is not None:
            asked = [replace(task, directory=str(directory)) for task in tasks if not task.is_keys]
            answers = self._answered(fitted, self._executors.run(ask_rows, asked) if asked else [], directory)
            tasks = [replace(task, answers=answers) for task in tasks]
        done = self._executors.run(by, tasks) if tasks else []
        written = [
            str(rows / file.name)
            for task, file in zip(tasks, done, strict=True)
            if not task.is_keys and file.rows
        ]
        return ChangedRows(str(keys), tuple(written), is_made=True)

    # epochs
    # --------------------------------------------------------------------------------------------------------

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        transform = self._transform_of(target.table)
        if not is_made_by(target, transform):
            raise SinkError(f"the transform of {target.table} changed while an epoch was being applied")
        if transform is None or not changes.slices:
            self._sink.apply(target, changes, end)
            return
        directory = self._directory / uuid4().hex
        storage.ensure_directory(directory)
        try:
            self._sink.apply(target, self._staged(transform, changes, directory), end)
        except ValuesMissingError as error:
            if not transform.fit(changes.slices[-1].file.schema).is_filter:
                raise
            raise RowRefusedError(
                f"an update moved a row of {target.table} into the filter, and the change lacks unchanged "
                "TOAST values of the row",
                hint=f"ALTER TABLE {target.table} REPLICA IDENTITY FULL; "
                f"then penstock tables resync CONFIG {target.table}",
            ) from error
        finally:
            storage.discard_tree(directory)

    @override
    def steps(self, slices: Sequence[FileSlice], end: Position) -> list[Position]:
        return self._sink.steps(slices, end)

    @override
    def needs_earlier_changes(self, changes: TableChanges) -> bool:
        transform = self._transform_of(changes.table)
        if transform is None:
            return self._sink.needs_earlier_changes(changes)
        return any(
            needs_all_changes(list(slices), transform.fit(schema))
            for schema, slices in groupby(changes.slices, lambda slice: slice.file.schema)
        )

    @override
    def find_rejected(
        self, target: Target, changes: TableChanges, end: Position
    ) -> dict[tuple[int, int], str]:
        transform = self._transform_of(target.table)
        if transform is None:
            return self._sink.find_rejected(target, changes, end)
        directory = self._directory / uuid4().hex
        storage.ensure_directory(directory)
        try:
            return self._sink.find_rejected(target, self._staged(transform, changes, directory), end)
        finally:
            storage.discard_tree(directory)

    def _staged(self, transform: Transform, changes: TableChanges, directory: Path) -> TableChanges:
        shapes = [
            (schema, list(slices))
            for schema, slices in groupby(changes.slices, lambda slice: slice.file.schema)
        ]
        plans = [
            plan_stages(slices, transform.fit(schema), directory, self._executors.parallelism)
            for schema, slices in shapes
        ]
        if len(shapes) > 1 and any(task.together for plan in plans for task in plan):
            raise SchemaChangedError(
                f"table {changes.table} was altered within an epoch whose changes lack unchanged TOAST "
                "values",
                hint=f"penstock tables resync CONFIG {changes.table}",
            )
        tasks = [task for at, plan in enumerate(plans) for task in self._asked(plan, directory / str(at))]
        slices: list[FileSlice] = [slice for found in self._executors.run(stage, tasks) for slice in found]
        counts = sum((slice.file.counts for slice in slices), ChangeCounts())
        views = {slice.file.schema: _plain(slice.file.schema) for slice in slices}
        return replace(changes, slices=tuple(slices), counts=counts, views=views)

    def _asked(self, plan: Sequence[StageTask], directory: Path) -> Sequence[StageTask]:
        """Evaluate the Spark expressions of the tasks in `plan`. Returns the tasks with the directory of the
        results, which is under `directory`.
        """
        fitted = plan[0].fitted
        if fitted.query is None:
            return plan
        storage.ensure_directory(directory)
        asked = self._executors.run(ask, [replace(task, directory=str(directory)) for task in plan])
        answers = self._answered(fitted, [path for paths in asked for path in paths], directory)
        return [replace(task, answers=answers) for task in plan]

    def _answered(self, fitted: Fitted, questions: Sequence[str | None], directory: Path) -> str:
        answers, files = str(directory / "answers"), [path for path in questions if path is not None]
        if files:
            assert self._queries is not None
            self._queries.answer(fitted, files, answers)
        return answers

    @override
    def can_evolve(self, target: Target, evolution: Evolution) -> bool:
        return self._sink.can_evolve(target, evolution)

    # tables
    # -------------------------------------------------------------------------------------------------------

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        self._sink.replace(table, _inner(shadow), position)

    @override
    def prepare_replace(self, table: TableName, shadow: Sink) -> None:
        self._sink.prepare_replace(table, _inner(shadow))

    @override
    def cancel_replace(self, table: TableName, shadow: Sink) -> None:
        self._sink.cancel_replace(table, _inner(shadow))

    @override
    def shadow(self, copy: str) -> Sink:
        return TransformingSink(
            self._sink.shadow(copy), self._transform_of, self._executors, self._directory, self._queries
        )

    @override
    def load_target(self, table: TableName) -> Target | None:
        return self._sink.load_target(table)

    @override
    def describe(self, table: TableName) -> str:
        return self._sink.describe(table)

    @override
    def find_problems(self, tables: Collection[TableName]) -> list[PenstockError]:
        return self._sink.find_problems(tables)

    @override
    def are_distinct(self, one: TableName, other: TableName) -> bool:
        return self._sink.are_distinct(one, other)

    @override
    def adopt(self, schema: TableSchema) -> bool:
        return self._sink.adopt(self._seen(schema))

    @override
    def remove_foreign(self, table: TableName) -> None:
        self._sink.remove_foreign(table)

    @override
    def drop(self, table: TableName) -> None:
        self._sink.drop(table)

    @override
    def release_ownership(self, table: TableName) -> None:
        self._sink.release_ownership(table)

    @override
    def drop_shadows(self) -> None:
        storage.discard_tree(self._directory)
        self._sink.drop_shadows()

    @override
    def read_small(self, table: TableName, version: int | None, limit_bytes: int) -> pa.Table | None:
        return self._sink.read_small(table, version, limit_bytes)

    @override
    def slow_warning(self, table: TableName) -> PenstockError | None:
        return self._sink.slow_warning(table)

    @override
    def version_at(self, table: TableName, position: Position) -> int | None:
        return self._sink.version_at(table, position)

    @override
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        return self._sink.read(table, version)

    @override
    def maintain(self, table: TableName) -> None:
        self._sink.maintain(table)

    @override
    def close(self) -> None:
        self._sink.close()

    def _check_begun(self, schema: TableSchema) -> None:
        """Raise an error if the configured transform changed since the snapshot began."""
        target = self._sink.load_target(schema.name)
        if (
            target is not None
            and target.origin is not None
            and not is_made_by(target, self._transform_of(schema.name))
        ):
            raise TableRewrittenError(
                f"the transform of {schema.name} changed while it was copied; its snapshot starts again"
            )

    def _seen(self, schema: TableSchema) -> TableSchema:
        transform = self._transform_of(schema.name)
        return schema if transform is None else transform.schema(schema)


def transforming(sink: Sink, spark: SparkSession, state: Path, transform_of: TransformOf) -> TransformingSink:
    """Create the `TransformingSink` of a pipeline. It calls `transform_of` for each operation, because the
    configuration may change.
    """
    return TransformingSink(
        sink, transform_of, SparkExecutors(spark), state / "transformed", SparkQueries(spark)
    )


def _restage_diverting(task: KeysTask) -> SnapshotFile:
    """Transform the keys or rows of a file. Rejected rows go to a file beside the directory of the accepted
    rows.
    """
    rejected_file = RejectedRowsFile(Path(task.directory).parent / f"refused-{task.index}.parquet")
    file = restage(task, rejected_file)
    rejected_file.close()
    return file


@dataclass(frozen=True, slots=True)
class _TransformingWriter(RejectingWriter):
    """`ChunkWriter` that transforms the batches before `writer` writes them."""

    transform: BatchTransform
    writer: ChunkWriter

    def __call__(
        self, batches: Iterator[pa.RecordBatch], place: SnapshotPlace, index: int, fence: Position
    ) -> tuple[SnapshotFile, Position]:
        return self.writer(self.transform(batches), place, index, fence)

    @override
    def with_rejected_to(self, on_rejected: OnRejected) -> ChunkWriter:
        return replace(self, transform=replace(self.transform, on_rejected=on_rejected))


def _plain(schema: TableSchema) -> View:
    return View({name: name for name in schema.column_names})


def _inner(sink: Sink) -> Sink:
    return sink.inner if isinstance(sink, TransformingSink) else sink
