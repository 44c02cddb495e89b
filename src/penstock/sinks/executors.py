"""Run tasks of a sink on Spark executors. The driver sends a function and its tasks, and receives the
results.

An epoch of a few hundred changes takes 12 ms in the driver, and four times as long as a Spark job on two busy
cores. Small epochs therefore run in the driver (decision 38), with the same functions.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import Broadcast, cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.errors import PenstockError, SinkError, TargetFileLostError, parse_error
from penstock.foreign import describe, missing_file
from penstock.spool.reader import FileSlice
from penstock.worker import settle_worker

_LIGHT_BYTES = 256 << 10
"""Maximum size of spool files that are read in the driver. These files have no compression and no
dictionaries, so their size equals their size in memory.
"""
_LIGHT_ROWS = 5_000

_BROADCAST_BYTES = 512 << 10
"""Shared data of at least this size is sent as a broadcast, which is destroyed after the job. Spark itself
would broadcast a closure of more than 1 MiB, and keep the file of that broadcast until the session ends.
"""

In = TypeVar("In")
Out = TypeVar("Out")


class Executors(ABC):
    """Runs tasks. Called by several threads of the driver at the same time."""

    @property
    @abstractmethod
    def parallelism(self) -> int:
        """The number of tasks that run at the same time."""

    @abstractmethod
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        """Run `function` for each of `tasks` independently, and return the results in order. If a task raises
        a Penstock error, `run` raises that error.

        Functions, tasks and results are sent between processes. A failed task may run again on another
        executor while its first attempt still runs, so each attempt must use its own file names. With
        `light`, the tasks may run in the driver: the caller states that all of them together are less work
        than starting a Spark job (see `are_light`).
        """


def are_light(slices: Sequence[FileSlice]) -> bool:
    """Whether reading `slices` and writing the result takes less time than starting a Spark job."""
    size, rows = sum(slice.file.bytes for slice in slices), sum(slice.file.rows for slice in slices)
    return size <= _LIGHT_BYTES and rows <= _LIGHT_ROWS


class SparkExecutors(Executors):
    """Runs one Spark job per call of `run`, and one Spark task per task. `failure` is the class of the errors
    that `run` raises for errors of Spark and of other libraries.
    """

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
            return [self._run_in_driver(function, task) for task in tasks]

        common, own = split_tasks(tasks)
        try:
            with self._shared(common) as load:

                def settled(part: object) -> Out:
                    settle_worker()
                    return function(join_task(load(), part))

                work = self._spark.sparkContext.parallelize(own, len(own)).map(settled)
                return work.setName(
                    f"penstock {getattr(function, '__name__', '')}"
                ).collect()  # shown in the Spark UI
        except (PySparkException, Py4JJavaError) as error:
            raise penstock_error(error, self._failure) from error

    @contextmanager
    def _shared(self, common: Common[In] | None) -> Iterator[Callable[[], Common[In] | None]]:
        """Yield a function that returns `common` on executors. It must not be called after the block ends."""
        data = cloudpickle.dumps(common)  # type: ignore[no-untyped-call]
        if len(data) < _BROADCAST_BYTES:
            yield _Loader(data)
            return
        broadcast = self._broadcast(data)
        try:
            yield _Loader(broadcast)
        finally:
            with suppress(PySparkException, Py4JError, OSError):  # the session may have ended
                broadcast.destroy()

    def _broadcast(self, data: bytes) -> Broadcast[bytes]:
        try:
            return self._spark.sparkContext.broadcast(data)
        except pickle.PicklingError as error:
            if isinstance(error.__context__, OSError):  # pyspark hides the cause, such as a full disk
                raise error.__context__ from None
            raise

    def _run_in_driver(self, function: Callable[[In], Out], task: In) -> Out:
        """Run a task in the driver, with the same errors as on an executor. Messages of other libraries may
        quote row values, so they are left out.
        """
        try:
            return function(task)
        except PenstockError:
            raise
        except Exception as error:
            raise self._failure(f"a task failed: {describe(error)}") from error


@dataclass(frozen=True, slots=True)
class Common(Generic[In]):
    """The class of a job's tasks, and the fields that are the same object in all of these tasks."""

    kind: Callable[..., In]
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads the data that all tasks of a job share. Sent to executors."""

    data: bytes | Broadcast[bytes]

    def __call__(self) -> Any:
        data = self.data
        return pickle.loads(data if isinstance(data, bytes) else data.value)


def split_tasks(tasks: Sequence[In]) -> tuple[Common[In] | None, Sequence[object]]:
    """Separate the fields that all tasks share from the other fields of each task. Returns None and the tasks
    themselves if there is only one task, or if the tasks are not dataclasses of one class.

    Spark serialises the closure once per job, but each task separately. Without the separation, the file list
    of a table would be sent once per task.
    """
    first = tasks[0]
    if len(tasks) == 1 or not is_dataclass(first) or any(type(task) is not type(first) for task in tasks):
        return None, tasks
    names = [field.name for field in fields(first)]
    shared = {
        name: getattr(first, name)
        for name in names
        if all(getattr(task, name) is getattr(first, name) for task in tasks)
    }
    own = [{name: getattr(task, name) for name in names if name not in shared} for task in tasks]
    return Common(type(first), shared), own


def join_task(common: Common[In] | None, own: Any) -> In:
    """Restore a task from its shared fields (`common`) and its other fields (`own`), see `split_tasks`."""
    task: In = own if common is None else common.kind(**common.fields, **own)
    return task


def penstock_error(
    error: Exception, otherwise: type[PenstockError], doing: str = "a task failed"
) -> PenstockError:
    """The Penstock error that the text of a Spark error contains. If there is none, an error of the class
    `otherwise` with a description of the Spark error, or `TargetFileLostError` if a file of the target is
    missing.
    """
    found = parse_error(str(error))
    if found is not None:
        return found
    is_lost = missing_file(error) is not None and issubclass(otherwise, SinkError)
    return (TargetFileLostError if is_lost else otherwise)(f"{doing}: {describe(error)}")
