"""Who does the work of a sink: a worker of Spark's, or the driver, where it comes to nearly nothing."""

from __future__ import annotations

import os

import pytest
from pyspark.sql import SparkSession

from penstock.errors import SinkError, SinkRefusedError
from penstock.sinks.executors import SparkExecutors


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
