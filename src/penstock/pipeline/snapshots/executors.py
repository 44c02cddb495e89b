"""Those who read and write for a snapshot: Spark's executors. The coordinator hands them functions and learns what they wrote."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.errors import SinkError, SnapshotTaskError
from penstock.schema import TableSchema
from penstock.sinks.changed import changed_keys
from penstock.sinks.executors import Executors, SparkExecutors, error_of_ours
from penstock.sinks.slices import load_changes
from penstock.spool.range import FileSlice

_POOL = "penstock-snapshot"


class SnapshotExecutors(Executors):
    """An error that is not one of ours is a `SnapshotTaskError`."""

    @abstractmethod
    def enter(self) -> None:
        """Called by each thread, before anything else, that uses these executors and starts threads that do."""

    @abstractmethod
    def cancel(self) -> None:
        """End what is being done for all of them, as far as that can be ended; `run` then raises."""

    @abstractmethod
    def write_keys(self, schema: TableSchema, slices: Sequence[FileSlice], directory: Path, constants: Sequence[str] = ()) -> None:
        """Add all keys that the changes in `slices` show, each once, as Parquet files with the columns of `changed_keys`."""


class SparkSnapshotExecutors(SparkExecutors, SnapshotExecutors):
    def __init__(self, spark: SparkSession) -> None:
        super().__init__(spark, SnapshotTaskError)
        self._group = f"{_POOL}-{uuid4().hex}"

    @override
    def enter(self) -> None:
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        self._spark.sparkContext.setJobGroup(self._group, "tables are copied", interruptOnCancel=True)

    @override
    def cancel(self) -> None:
        self._spark.sparkContext.cancelJobGroup(self._group)

    @override
    def write_keys(self, schema: TableSchema, slices: Sequence[FileSlice], directory: Path, constants: Sequence[str] = ()) -> None:
        session = self._spark.newSession()
        session.conf.set("spark.sql.session.timeZone", "UTC")  # keys are written as text on their way to the source
        try:
            changed_keys(load_changes(session, schema, slices), schema, constants).write.mode("append").parquet(str(directory))
        except (PySparkException, Py4JJavaError) as error:
            raise error_of_ours(error, SinkError) from error
