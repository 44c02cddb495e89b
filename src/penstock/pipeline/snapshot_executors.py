"""Those who read and write for a snapshot: Spark's executors. The coordinator hands them functions and learns what they wrote."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.errors import PenstockError, SinkError, SnapshotTaskError, parse_error
from penstock.schema import TableSchema
from penstock.sinks.changed import changed_keys
from penstock.sinks.slices import load_changes
from penstock.spool.range import FileSlice

_POOL = "penstock-snapshot"

In = TypeVar("In")
Out = TypeVar("Out")


class Executors(ABC):
    """Called by several threads of the driver at once."""

    @property
    @abstractmethod
    def parallelism(self) -> int:
        """How many tasks run at the same time."""

    @abstractmethod
    def enter(self) -> None:
        """Called by each thread, before anything else, that uses these executors and starts threads that do."""

    @abstractmethod
    def cancel(self) -> None:
        """End what is being done for all of them, as far as that can be ended; `run` then raises."""

    @abstractmethod
    def run(self, function: Callable[[In], Out], tasks: Sequence[In]) -> list[Out]:
        """Do all of `tasks`, each by itself; raises the error of ours that one of them raised, or `SnapshotTaskError`."""

    @abstractmethod
    def write_keys(self, schema: TableSchema, slices: Sequence[FileSlice], directory: Path) -> None:
        """Write all keys that the changes in `slices` show, each once, as Parquet files with the columns of `changed_keys`."""


class SparkExecutors(Executors):
    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._group = f"{_POOL}-{uuid4().hex}"

    @override
    def enter(self) -> None:
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        self._spark.sparkContext.setJobGroup(self._group, "tables are copied", interruptOnCancel=True)

    @override
    def cancel(self) -> None:
        self._spark.sparkContext.cancelJobGroup(self._group)

    @property
    @override
    def parallelism(self) -> int:
        return self._spark.sparkContext.defaultParallelism

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In]) -> list[Out]:
        try:
            return self._spark.sparkContext.parallelize(tasks, len(tasks)).map(function).collect()
        except (PySparkException, Py4JJavaError) as error:
            raise _found(error, SnapshotTaskError) from error

    @override
    def write_keys(self, schema: TableSchema, slices: Sequence[FileSlice], directory: Path) -> None:
        session = self._spark.newSession()
        session.conf.set("spark.sql.session.timeZone", "UTC")  # keys are written as text on their way to the source
        try:
            changed_keys(load_changes(session, schema, slices), schema).write.parquet(str(directory))
        except (PySparkException, Py4JJavaError) as error:
            raise _found(error, SinkError) from error


def _found(error: Exception, otherwise: type[PenstockError]) -> PenstockError:
    """What Spark made of an error of ours; or its own first words."""
    words = str(error).strip().splitlines()
    return parse_error(str(error)) or otherwise(f"a task of a snapshot failed: {words[0] if words else type(error).__name__}")
