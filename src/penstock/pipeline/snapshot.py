"""The snapshot coordinator: copies tables as they are at one position, their fence.

All tables that wait are copied under one exported snapshot. Executors read ctid chunks and write files where the target wants them; when
all chunks of a table are there, the target takes the files and the fence in one commit. Until then the target has no applied position, so
a crash at any moment only means that the table is copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.errors import PenstockError, Recovery, SnapshotLostError, parse_error
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.snapshot_task import ChunkTask, chunk_writer
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_schema
from penstock.postgres.chunks import plan_chunks
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.exported import ExportedSnapshot, export_snapshot
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableName
from penstock.sinks.base import Sink, SnapshotFile

_ATTEMPTS = 5


class _StoppedError(Exception):
    """The run is to end; what is not finished is copied again by the next one."""


@dataclass(frozen=True, slots=True)
class SnapshotCoordinator:
    spark: SparkSession
    address: SourceAddress
    sink: Sink
    observer: PipelineObserver
    chunk_bytes: int
    types: TypePolicy = TypePolicy.DEFAULT
    publication: str | None = None

    def copy(
        self,
        tables: Sequence[CatalogTable],
        on_fence: Callable[[TableName, Position], None],
        on_finished: Callable[[TableName], None],
        is_stopping: Callable[[], bool],
    ) -> dict[TableName, PenstockError]:
        """Copy all `tables`; gives back those that cannot be copied, each with its reason. A lost snapshot is taken anew.

        `on_fence` is told, for each table, after which position its changes are needed; `on_finished`, that its target is complete.
        """
        failures: dict[TableName, PenstockError] = {}
        waiting = list(tables)
        for attempt in range(1, _ATTEMPTS + 1):
            with export_snapshot(self.address) as exported:
                lost = []
                for table in waiting:
                    try:
                        on_fence(table.name, exported.fence)
                        self._copy_one(table, exported, is_stopping)
                        on_finished(table.name)
                    except SnapshotLostError as error:
                        lost.append(table)
                        if attempt == _ATTEMPTS:
                            failures[table.name] = error
                    except PenstockError as error:
                        if error.recovery is not Recovery.OPERATOR:
                            raise
                        failures[table.name] = error
                    except _StoppedError:
                        return failures
            waiting = lost
            if not waiting:
                break
        return failures

    def _copy_one(self, table: CatalogTable, exported: ExportedSnapshot, is_stopping: Callable[[], bool]) -> None:
        with connect(self.address) as connection:
            schema = inspect_schema(connection, table, self.types, self.publication)
            chunks = plan_chunks(connection, table, schema, self.chunk_bytes, self.publication)
        self.observer.snapshot_planned(table.name, len(chunks), sum(chunk.heap_bytes for chunk in chunks))
        place = self.sink.begin_snapshot(schema, exported.fence)
        tasks = [ChunkTask(index, chunk, place) for index, chunk in enumerate(chunks)]
        files: list[SnapshotFile] = []
        wave = max(1, self.spark.sparkContext.defaultParallelism * 2)
        for start in range(0, len(tasks), wave):
            if is_stopping():
                raise _StoppedError
            part = tasks[start : start + wave]
            written = self._run(exported.name, part)
            files += written
            self.observer.snapshot_advanced(
                table.name, len(part), sum(file.rows for file in written), sum(task.chunk.heap_bytes for task in part)
            )
        self.sink.finish_snapshot(schema, files, exported.fence)
        self.observer.snapshot_finished(table.name, sum(file.rows for file in files))

    def _run(self, snapshot: str, tasks: Sequence[ChunkTask]) -> list[SnapshotFile]:
        """One Spark job: a task for each chunk."""
        context = self.spark.sparkContext
        try:
            writer = chunk_writer(self.address, snapshot, refuse_inexact=self.types.refuses_inexact)
            return context.parallelize(tasks, len(tasks)).map(writer).collect()
        except (PySparkException, Py4JJavaError) as error:
            found = parse_error(str(error))
            if found is None:
                raise
            raise found from error
