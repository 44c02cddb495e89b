"""The sink that a configuration asks for. Each kind is imported only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pipeline.config import PipelineConfig
from penstock.sinks.base import Sink, Targets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def open_sink(config: PipelineConfig, spark: SparkSession) -> Sink:
    from penstock.sinks.delta import DeltaSink

    return DeltaSink(spark, config.sink.root, config.pipeline)


def open_targets(config: PipelineConfig) -> Targets:
    """The same tables, looked at without Spark."""
    from penstock.sinks.delta_targets import DeltaTargets

    return DeltaTargets(config.sink.root, config.pipeline)


def sink_packages() -> tuple[str, ...]:
    """The Maven coordinates that the sink needs, for the running Spark."""
    from penstock.spark.session import delta_package

    return (delta_package(),)
