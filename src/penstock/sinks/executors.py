"""Those who read and write for a sink: Spark's executors. The driver hands them functions, and learns what became of them.

An epoch of a few hundred changes is an exception: it takes 12 ms to work out and Spark four times that to have it worked out, on two cores
that are busy. So what comes to nearly nothing is done by the driver (decision 38), by the same functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.errors import PenstockError, SinkError, TargetFileLostError, parse_error
from penstock.foreign import describe, missing_file
from penstock.spool.range import FileSlice
from penstock.worker import settle_worker

_LIGHT_BYTES = 256 << 10
"""Of files that are as long as what is read of them: neither compressed nor with a list of values that repeat."""
_LIGHT_ROWS = 5_000

In = TypeVar("In")
Out = TypeVar("Out")


class Executors(ABC):
    """Called by several threads of the driver at once."""

    @property
    @abstractmethod
    def parallelism(self) -> int:
        """How many tasks run at the same time."""

    @abstractmethod
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        """Do all of `tasks`, each by itself, and give what came of them in their order; raises the error of ours that one of them raised.

        Function, tasks and results travel between processes. A task that fails may be tried again, elsewhere, and while its first attempt
        still runs: what it writes must have a name of its own each time. `light`: together they are less work than it is to hand them out
        (see `are_light`), so that they may be done right here.
        """


def are_light(slices: Sequence[FileSlice]) -> bool:
    """Whether to read these, and write what they come to, takes less time than Spark takes to start a job."""
    size, rows = sum(slice.file.bytes for slice in slices), sum(slice.file.rows for slice in slices)
    return size <= _LIGHT_BYTES and rows <= _LIGHT_ROWS


class SparkExecutors(Executors):
    """One job for each `run`, one task of Spark's for each of `tasks`. `failure`: what is raised for an error that is not one of ours."""

    def __init__(self, spark: SparkSession, failure: type[PenstockError] = SinkError) -> None:
        self._spark = spark
        self._failure = failure

    @property
    @override
    def parallelism(self) -> int:
        return self._spark.sparkContext.defaultParallelism

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        if light:
            return [self._done(function, task) for task in tasks]

        def settled(task: In) -> Out:
            settle_worker()
            return function(task)

        try:
            work = self._spark.sparkContext.parallelize(tasks, len(tasks)).map(settled)
            return work.setName(f"penstock {getattr(function, '__name__', '')}").collect()  # what Spark's own pages show
        except (PySparkException, Py4JJavaError) as error:
            raise error_of_ours(error, self._failure) from error

    def _done(self, function: Callable[[In], Out], task: In) -> Out:
        """By the driver, with the errors that it would have had from an executor. What others than we say may quote a row."""
        try:
            return function(task)
        except PenstockError:
            raise
        except Exception as error:
            raise self._failure(f"a task failed: {describe(error)}") from error


def error_of_ours(error: Exception, otherwise: type[PenstockError], doing: str = "a task failed") -> PenstockError:
    """The error of ours that Spark passed on as text; else one that says what kind of error it is."""
    found = parse_error(str(error))
    if found is not None:
        return found
    is_lost = missing_file(error) is not None and issubclass(otherwise, SinkError)
    return (TargetFileLostError if is_lost else otherwise)(f"{doing}: {describe(error)}")
