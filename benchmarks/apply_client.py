"""One Spark session with pipelines, for `benchmarks.apply`. Each line of JSON on standard input is a request;
each response is one line.

`copy` creates the targets. `drain` runs a pipeline until it has applied everything committed so far, and
measures the time from the call of `run` to the record of the epoch with the last change. CPU is the sum of
driver, JVM and Python workers, including the capture. `follow` runs a pipeline until the next line arrives,
and reports the time at which each epoch was recorded.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from typing_extensions import override

from benchmarks.cpu import TreeCpu
from penstock.config.model import PipelineConfig
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.pipeline import Pipeline
from penstock.position import Position
from penstock.spark.java import delta_package, iceberg_package
from penstock.spark.session import build_session

_PATIENCE_SECONDS = 60.0


class _Clock(PipelineObserver):
    """Stops at the epoch that reaches `goal`, while all measured processes still run."""

    def __init__(self, goal: Position) -> None:
        self._goal = goal
        self._cpu = TreeCpu(os.getpid(), forgets=True)
        self._start = time.perf_counter()
        self.report: dict[str, float] = {}
        self._rows = 0
        self._epochs = 0

    @override
    def epoch_recorded(self, report: EpochReport) -> None:
        self._rows += report.rows
        self._epochs += 1
        if report.position >= self._goal and not self.report:
            wall = time.perf_counter() - self._start
            self.report = {
                "wall_seconds": wall,
                "cpu_seconds": self._cpu.stop(),
                "rows": self._rows,
                "epochs": self._epochs,
            }


class _Epochs(PipelineObserver):
    """The time at which each epoch became visible to readers, or a moment later."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.found: list[dict[str, float]] = []

    @override
    def streaming_started(self) -> None:
        self.begun.set()

    @override
    def epoch_recorded(self, report: EpochReport) -> None:
        self.found.append(
            {
                "position": report.position.value,
                "at": time.time(),
                "rows": report.rows,
                "seconds": report.seconds,
            }
        )


class _Pipelines:
    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def copy(self, task: Mapping[str, Any]) -> dict[str, Any]:
        result = Pipeline(_config(task), self._spark).run(once=True)
        if result.failed:
            raise RuntimeError(str(result.failed))
        return {}

    def drain(self, task: Mapping[str, Any]) -> dict[str, Any]:
        clock = _Clock(Position.parse(task["goal"]))
        Pipeline(_config(task), self._spark, clock).run(once=True)
        return clock.report

    def follow(self, task: Mapping[str, Any]) -> dict[str, Any]:
        epochs = _Epochs()
        pipeline = Pipeline(_config(task), self._spark, epochs)
        thread = threading.Thread(target=pipeline.run, name="pipeline")
        thread.start()
        if not epochs.begun.wait(_PATIENCE_SECONDS):
            raise TimeoutError("the pipeline did not start")
        cpu, start = TreeCpu(os.getpid(), forgets=True), time.perf_counter()
        _say({})
        sys.stdin.readline()
        used, wall = cpu.stop(), time.perf_counter() - start
        pipeline.stop()
        thread.join()
        return {"epochs": epochs.found, "cpu_share": used / wall}


def _config(task: Mapping[str, Any]) -> PipelineConfig:
    return PipelineConfig.model_validate(task["config"])


def _say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        spark = build_session(
            "bench", packages=[delta_package(), iceberg_package()], log=Path(directory) / "spark.log"
        )
        pipelines = _Pipelines(spark)
        _say({})
        for line in sys.stdin:
            task = json.loads(line)
            _say(getattr(pipelines, task["do"])(task))


if __name__ == "__main__":
    main()
