"""The sink that a configuration asks for. Each kind is imported only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.sink_config import PostgresConfig
from penstock.postgres.connection import SourceAddress
from penstock.sinks.base import Sink, Targets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.sinks.postgres_targets import Naming


def open_sink(config: PipelineConfig, spark: SparkSession) -> Sink:
    if config.sink.postgres is not None:
        from penstock.sinks.executors import SparkExecutors
        from penstock.sinks.postgres_sink import PostgresSink

        scratch = config.sink.root / "penstock_reads"
        address, naming = _postgres(config.sink.postgres)
        return PostgresSink(SparkExecutors(spark), address, config.pipeline, naming, spark=spark, scratch=scratch)
    if config.sink.parquet is not None:
        from penstock.sinks.executors import SparkExecutors
        from penstock.sinks.parquet_sink import ParquetSink

        return ParquetSink(SparkExecutors(spark), config.sink.root, config.pipeline, spark)
    from penstock.sinks.delta import DeltaSink

    return DeltaSink(spark, config.sink.root, config.pipeline)


def open_targets(config: PipelineConfig) -> Targets:
    """The same tables, looked at without Spark."""
    if config.sink.postgres is not None:
        from penstock.sinks.postgres_targets import PostgresTargets

        address, naming = _postgres(config.sink.postgres)
        return PostgresTargets(address, config.pipeline, naming)
    if config.sink.parquet is not None:
        from penstock.sinks.parquet_targets import ParquetTargets

        return ParquetTargets(config.sink.root, config.pipeline)
    from penstock.sinks.delta_targets import DeltaTargets

    return DeltaTargets(config.sink.root, config.pipeline)


def _postgres(config: PostgresConfig) -> tuple[SourceAddress, Naming]:
    from penstock.sinks.postgres_targets import Naming

    return config.address(), Naming(config.schemas, config.schema_prefix)


def sink_packages(config: PipelineConfig) -> tuple[str, ...]:
    """The Maven coordinates that the sink needs, for the running Spark."""
    if config.sink.delta is None:
        return ()
    from penstock.spark.session import delta_package

    return (delta_package(),)
