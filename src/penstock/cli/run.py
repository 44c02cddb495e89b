"""`penstock run`."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from pyspark.sql import SparkSession
from rich.console import Console

from penstock.cli.live import LiveDisplay
from penstock.cli.signals import on_signals
from penstock.logs import is_json, worker_environment
from penstock.pipeline.config import PipelineConfig, load_config
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.sinks import sink_packages
from penstock.spark.session import build_session

_log = logging.getLogger(__name__)


def run_pipeline(path: Path, *, once: bool, console: Console) -> int:
    """Run until stopped, or caught up; gives back the exit code."""
    config = load_config(path)
    config.source.address()  # a missing secret is found before Spark is started
    ended_by: list[int] = []
    with ExitStack() as stack:
        observer = PipelineObserver() if is_json() else stack.enter_context(LiveDisplay(console))
        pipeline = start_pipeline(config, observer, lambda: load_config(path))

        def stop(number: int) -> None:
            ended_by.append(number)
            pipeline.stop()

        on_signals(stop)
        result = pipeline.run(once=once)
    failed = result.failed
    facts = {"position": str(result.position), "tables": len(result.tables), "failed": len(failed)}
    _log.info("run ended", extra=facts)
    console.print(f"at {result.position}: {len(result.tables) - len(failed)} tables up to date, {len(failed)} failed", highlight=False)
    if signal.SIGINT in ended_by:
        return 130
    return 1 if failed and (once or len(failed) == len(result.tables)) else 0


def start_pipeline(config: PipelineConfig, observer: PipelineObserver, reload: Callable[[], PipelineConfig] | None = None) -> Pipeline:
    return Pipeline(config, start_session(config), observer, reload)


def start_session(config: PipelineConfig) -> SparkSession:
    """The Spark application that the configuration asks for; what its JVM prints goes to the state directory."""
    return build_session(
        f"penstock {config.pipeline}",
        master=config.spark.master,
        packages=config.spark.packages or sink_packages(config),
        conf={**{f"spark.executorEnv.{name}": value for name, value in worker_environment().items()}, **config.spark.settings()},
        log=config.state / "spark.log",
    )
