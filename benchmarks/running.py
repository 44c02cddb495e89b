"""A pipeline that runs in this process during a benchmark, its epochs, and a steady load on its source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psycopg
import yaml
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.cli.run import start_session
from penstock.config.model import PipelineConfig, load_config
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.table_states import TableState

_PATIENCE_SECONDS = 3600.0
SINKS: dict[str, dict[str, Any]] = {
    "delta": {"delta": {"path": "lake"}},
    "iceberg": {"iceberg": {"warehouse": "lake", "catalog": "bench"}},
}


class Epochs(PipelineObserver):
    """End, duration and number of rows of each epoch."""

    def __init__(self) -> None:
        self.ended: list[tuple[float, float, int]] = []

    @override
    def epoch_recorded(self, report: EpochReport) -> None:
        self.ended.append((time.monotonic(), report.seconds, report.rows))

    def seconds(self, low: float, high: float) -> list[float]:
        """Durations of the epochs that ended between two times, shortest first. Epochs without rows are not
        counted.
        """
        return sorted(seconds for at, seconds, rows in self.ended.copy() if low <= at <= high and rows)

    def seconds_of(self, moment: float) -> float:
        """Duration of the last epoch that ended before this time, or of the one that was running."""
        return min(self.ended.copy(), key=lambda epoch: abs(epoch[0] - moment))[1]


class RunningPipeline:
    """Runs during a `with` block. `tables` is as in the configuration file."""

    def __init__(self, dsn: str, directory: Path, sink: str, tables: list[str], **more: Any) -> None:
        path = directory / "pipeline.yaml"
        document = {
            "pipeline": "bench",
            "source": {"dsn": dsn},
            "tables": tables,
            "sink": SINKS[sink],
            **more,
        }
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        self.config: PipelineConfig = load_config(path)
        self.spark: SparkSession = start_session(self.config)
        self.epochs = Epochs()
        self._pipeline = Pipeline(self.config, self.spark, self.epochs)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="bench-pipeline", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipeline.stop()
        self._thread.join()
        self.spark.stop()

    def _run(self) -> None:
        try:
            self._pipeline.run()
        except Exception as error:  # noqa: BLE001 it is raised again where the run is waited for
            self._failure = error

    def is_streaming(self, count: int) -> bool:
        """Whether this number of tables is streaming."""
        return (
            sum(status.state is TableState.STREAMING for status in self._pipeline.statuses.values()) >= count
        )

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise TimeoutError(what)
            time.sleep(0.05)


class Load(threading.Thread):
    """Calls `work` with a connection, at this rate per second, until it is stopped."""

    def __init__(self, dsn: str, per_second: float, work: Callable[[psycopg.Connection, int], None]) -> None:
        super().__init__(name="bench-load", daemon=True)
        self._dsn = dsn
        self._pause = 1 / per_second
        self._work = work
        self._ending = threading.Event()

    @override
    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            turn = 0
            while not self._ending.wait(self._pause):
                self._work(connection, turn)
                turn += 1

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join()
