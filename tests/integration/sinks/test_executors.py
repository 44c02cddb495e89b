"""Which process does the work of a sink: a Spark worker, or the driver if the work is small."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
from pyspark import RDD, SparkContext
from pyspark.sql import SparkSession

from penstock.errors import SinkError, SinkRefusedError
from penstock.foreign import is_disk_full
from penstock.sinks.executors import SparkExecutors
from penstock.sinks.iceberg.lookup import LakeFile


def test_light_tasks_are_done_by_the_driver_and_others_by_workers(spark: SparkSession) -> None:
    executors = SparkExecutors(spark)
    assert executors.run(lambda _: os.getpid(), [1, 2], light=True) == [os.getpid(), os.getpid()]
    assert os.getpid() not in executors.run(lambda _: os.getpid(), [1, 2])


@pytest.mark.parametrize("light", [False, True])
def test_a_task_that_fails_raises_the_same_wherever_it_is_done(spark: SparkSession, light: bool) -> None:
    executors = SparkExecutors(spark)

    def fails(task: int) -> None:
        raise SinkRefusedError("not this one", hint="another") if task else ValueError("secret")

    with pytest.raises(SinkRefusedError, match="not this one") as refused:
        executors.run(fails, [1], light=light)
    assert refused.value.hint == "another"
    with pytest.raises(SinkError, match="a task failed") as failed:
        executors.run(fails, [0], light=light)
    assert "secret" not in str(failed.value), "it may be a value of a row"


def test_shared_data_of_a_jobs_tasks_is_sent_once(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = tuple(range(10_000))
    tasks = [LakeFile("a", index, numbers) for index in range(3)]
    sent: list[int] = []
    parallelize = SparkContext.parallelize

    def measured(self: SparkContext, some: Sequence[object], slices: int) -> RDD[object]:
        sent.extend(len(pickle.dumps(each)) for each in some)
        return parallelize(self, some, slices)

    monkeypatch.setattr(SparkContext, "parallelize", measured)
    assert SparkExecutors(spark).run(lambda task: (len(task.columns), task.sequence), tasks) == [
        (10_000, index) for index in range(3)
    ]
    assert sum(sent) < 1000, "the list is not in the tasks"


def test_large_shared_data_of_a_job_leaves_no_file_behind(spark: SparkSession) -> None:
    """A session lives as long as a pipeline, which runs a job for each epoch."""
    numbers = tuple(range(1_000_000, 1_500_000))
    tasks = [LakeFile("a", index, numbers) for index in range(3)]
    assert len(pickle.dumps(numbers)) > 2 << 20, "Spark sends this much by a broadcast"
    executors, directory = SparkExecutors(spark), Path(str(spark.sparkContext._temp_dir))
    before = set(directory.iterdir())
    assert executors.run(lambda task: len(task.columns), tasks) == [500_000] * 3
    assert set(directory.iterdir()) == before


def test_a_disk_that_is_full_while_shared_data_is_sent_is_named(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error policy tells a full disk, which passes, from other errors."""
    numbers = tuple(range(1_000_000, 1_500_000))
    tasks = [LakeFile("a", index, numbers) for index in range(2)]

    def fail(_: object, file: IO[bytes], *__: object) -> None:
        file.close()  # pyspark leaves that to the garbage collector
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("pyspark.core.broadcast.pickle.dump", fail)
    with pytest.raises(OSError, match="no space left") as raised:
        SparkExecutors(spark).run(lambda task: len(task.columns), tasks)
    assert is_disk_full(raised.value)
