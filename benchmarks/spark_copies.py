"""One Spark session that copies a table repeatedly: `python -m benchmarks.spark_copies`.

Each line on standard input names a method and a directory; the figures of each copy are printed as a line of
JSON. The clock starts when the session is ready. CPU is the sum of driver, JVM and Python workers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import SparkSession
from typing_extensions import override

from benchmarks.cpu import TreeCpu
from penstock.config.model import PipelineConfig
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.snapshots.task import ChunkTask, chunk_writer
from penstock.postgres.catalog import inspect_schema, inspect_tables
from penstock.postgres.chunks import plan_chunks, snapshot_schema
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.snapshot_export import export_snapshot
from penstock.schema import TableName
from penstock.sinks.base import SnapshotPlace
from penstock.spark.java import delta_package
from penstock.spark.session import build_session
from penstock.worker import settle_worker

_DRIVER = "org.postgresql:postgresql:42.7.8"
_FETCH_ROWS = 10_000
_WAKE_SECONDS = 0.5
_LONGEST_REST_SECONDS = 10.0
_IDLE_CPU_SECONDS = 0.05
_CHUNK_BYTES: int = PipelineConfig.model_fields["snapshot_chunk_bytes"].default
_CHUNKS_A_TASK = 4
"""Minimum number, so that no task has much more work than the others."""

Report = dict[str, float]


class _Copies:
    def __init__(self, spark: SparkSession, dsn: str, table: TableName, rows: int) -> None:
        self._spark = spark
        self._dsn = dsn
        self._table = table
        self._rows = rows
        self._pipelines = 0

    @property
    def ways(self) -> Mapping[str, Callable[[Path], Report]]:
        return {"jdbc": self.jdbc, "parquet": self.parquet, "delta": self.delta}

    def jdbc(self, directory: Path) -> Report:
        """One partition for each concurrent task, by equal ranges of the key."""
        partitions = self._spark.sparkContext.defaultParallelism
        address = conninfo_to_dict(self._dsn)
        options = {
            "url": f"jdbc:postgresql://{address['host']}:{address['port']}/{address['dbname']}?user={address['user']}",
            "driver": "org.postgresql.Driver",
            "dbtable": str(self._table),
            "partitionColumn": "id",
            "lowerBound": "1",
            "upperBound": str(self._rows + 1),
            "numPartitions": str(partitions),
            "fetchsize": str(_FETCH_ROWS),
        }
        with _Watch() as watch:
            self._spark.read.format("jdbc").options(**options).load().write.parquet(str(directory))
        return watch.report | {"rows": self._spark.read.parquet(str(directory)).count()}

    def parquet(self, directory: Path) -> Report:
        """The work of a snapshot on executors, without adding the files to a target."""
        directory.mkdir()
        address = SourceAddress.parse(self._dsn)
        self._wake_workers()
        with _Watch() as watch, export_snapshot(address) as exported:
            with connect(address) as connection:
                table = next(each for each in inspect_tables(connection) if each.name == self._table)
                schema = inspect_schema(connection, table)
                whole = sum(
                    chunk.heap_bytes for chunk in plan_chunks(connection, table, schema, _CHUNK_BYTES, None)
                )
                chunk_bytes = min(
                    _CHUNK_BYTES, whole // (self._spark.sparkContext.defaultParallelism * _CHUNKS_A_TASK)
                )
                chunks = plan_chunks(connection, table, schema, chunk_bytes, None)
            place = SnapshotPlace(str(directory), snapshot_schema(schema), "snapshot")
            tasks = [ChunkTask(index, chunk, place) for index, chunk in enumerate(chunks)]
            files = (
                self._spark.sparkContext.parallelize(tasks, len(tasks))
                .map(chunk_writer(address, exported.name))
                .collect()
            )
        return watch.report | {"rows": sum(file.rows for file in files)}

    def delta(self, directory: Path) -> Report:
        """A pipeline that copies the table and ends, measured from the plan of its snapshot to the commit."""
        self._pipelines += 1
        config = PipelineConfig.model_validate(
            {
                "pipeline": f"bench_{self._pipelines}",
                "source": {"dsn": self._dsn},
                "tables": [{"table": str(self._table)}],
                "sink": {"delta": {"path": directory}},
                "state": directory.with_suffix(".state"),
            }
        )
        stages = _Stages()
        self._wake_workers()
        start = time.perf_counter()
        Pipeline(config, self._spark, stages).run(once=True)
        return stages.report | {"run_seconds": time.perf_counter() - start}

    def _wake_workers(self) -> None:
        """Spark ends Python workers that are idle for a minute, which does not happen in a snapshot."""
        count = self._spark.sparkContext.defaultParallelism
        self._spark.sparkContext.parallelize(range(count), count).foreach(_wake)


def _wake(_: int) -> None:
    """Load the modules that a task loads, and last long enough that each worker gets one task."""
    importlib.import_module(ChunkTask.__module__)
    settle_worker()
    time.sleep(_WAKE_SECONDS)


def _rest() -> None:
    """Wait until the JVM has compiled its code, which would slow down the next contender."""
    deadline = time.monotonic() + _LONGEST_REST_SECONDS
    while time.monotonic() < deadline:
        with TreeCpu(os.getpid(), forgets=True) as used:
            time.sleep(_WAKE_SECONDS)
        if used.seconds < _IDLE_CPU_SECONDS:
            return


class _Watch:
    """Runs from its creation, or in a `with` block."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._cpu = TreeCpu(os.getpid(), forgets=True)
        self._wall = time.perf_counter()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> Report:
        self.report = {"wall_seconds": time.perf_counter() - self._wall, "cpu_seconds": self._cpu.stop()}
        return self.report


class _Stages(PipelineObserver):
    """Watches the snapshot of the one table."""

    def __init__(self) -> None:
        self.report: Report = {}
        self._watch = _Watch()

    @override
    def snapshot_planned(self, table: TableName, chunks: int, heap_bytes: int) -> None:
        self._watch = _Watch()

    @override
    def snapshot_finished(self, table: TableName, rows: int) -> None:
        self.report = self._watch.stop() | {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark_copies", description=__doc__)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--table", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--parallelism", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    # Output of the JVM must not mix with the reports.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spark = build_session(
        "penstock benchmark",
        master=f"local[{arguments.parallelism}]",
        packages=(delta_package(), _DRIVER),
        conf={"spark.driver.memory": "2g"},
        log=arguments.directory / "spark.log",
    )
    copies = _Copies(spark, arguments.dsn, TableName.parse(arguments.table), arguments.rows)
    print(json.dumps({"spark": spark.version}), file=answers)
    for line in sys.stdin:
        way, _, directory = line.rstrip("\n").partition(" ")
        report = copies.ways[way](Path(directory))
        _rest()
        print(json.dumps(report), file=answers)
    spark.stop()


if __name__ == "__main__":
    main()
