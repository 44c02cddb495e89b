"""Open the sink of a configuration. Each kind is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.config.model import PipelineConfig
from penstock.config.sink import IcebergConfig, MaintenanceConfig, PostgresConfig
from penstock.errors import EnvironmentUnfitError
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.sinks.base import READS, Sink, Targets
from penstock.sinks.modes import Mode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.sinks.postgres.targets import Naming


def open_sink(
    config: PipelineConfig, spark: SparkSession, mode_of: Callable[[TableName], Mode] | None = None
) -> Sink:
    """Open the sink. `mode_of` returns the current mode of a table, which may change while the pipeline runs;
    by default the mode in `config`.
    """
    modes = mode_of or config.mode_of
    if config.sink.postgres is not None:
        from penstock.sinks.executors import SparkExecutors
        from penstock.sinks.postgres.sink import PostgresSink

        scratch = config.sink.root / READS
        address, naming = _postgres(config.sink.postgres)
        return PostgresSink(
            SparkExecutors(spark),
            address,
            config.pipeline,
            naming,
            mode_of=modes,
            spark=spark,
            scratch=scratch,
        )
    if config.sink.parquet is not None:
        from penstock.sinks.executors import SparkExecutors
        from penstock.sinks.parquet.sink import ParquetSink

        return ParquetSink(SparkExecutors(spark), config.sink.root, config.pipeline, spark)
    if config.sink.iceberg is not None:
        return _iceberg_sink(config.sink.iceberg, config.pipeline, spark, modes, config.maintenance)
    from penstock.sinks.delta.sink import DeltaSink

    return DeltaSink(spark, config.sink.root, config.pipeline, modes, config.maintenance.delta)


def _iceberg_sink(
    config: IcebergConfig,
    pipeline: str,
    spark: SparkSession,
    mode_of: Callable[[TableName], Mode],
    chosen: MaintenanceConfig,
) -> Sink:
    from penstock.sinks.iceberg.definition import IcebergPlace
    from penstock.sinks.iceberg.maintenance import EXPIRE_EVERY, Maintenance
    from penstock.sinks.iceberg.sink import IcebergSink

    expire_every = EXPIRE_EVERY if chosen.vacuum else 0
    maintenance = Maintenance(
        chosen.compact_after, chosen.iceberg_keep_seconds, expire_every, chosen.iceberg_versions
    )
    place = IcebergPlace(
        config.catalog, config.warehouse, config.namespace, config.format_version, maintenance
    )
    return IcebergSink(spark, place, pipeline, mode_of=mode_of)


def open_targets(config: PipelineConfig) -> Targets:
    """Open the targets for inspection without Spark. Raises `EnvironmentUnfitError` if this is impossible."""
    if config.sink.postgres is not None:
        from penstock.sinks.postgres.targets import PostgresTargets

        address, naming = _postgres(config.sink.postgres)
        return PostgresTargets(address, config.pipeline, naming)
    if config.sink.parquet is not None:
        from penstock.sinks.parquet.targets import ParquetTargets

        return ParquetTargets(config.sink.root, config.pipeline)
    if config.sink.iceberg is not None:
        from penstock.sinks.iceberg.state import HadoopTargets

        iceberg = config.sink.iceberg
        if f"spark.sql.catalog.{iceberg.catalog}" in config.spark.conf:
            raise EnvironmentUnfitError(
                f"the catalog {iceberg.catalog} can be queried only with Spark",
                hint="use `penstock verify CONFIG`, which starts Spark",
            )
        return HadoopTargets(iceberg.warehouse, iceberg.namespace, config.pipeline)
    from penstock.sinks.delta.log import DeltaTargets

    return DeltaTargets(config.sink.root, config.pipeline)


def _postgres(config: PostgresConfig) -> tuple[SourceAddress, Naming]:
    from penstock.sinks.postgres.targets import Naming

    return config.address(), Naming(config.schemas, config.schema_prefix)


def sink_packages(config: PipelineConfig) -> tuple[str, ...]:
    """Return the Maven coordinates of the packages that the sink needs with the running Spark."""
    from penstock.spark.java import delta_package, iceberg_package

    if config.sink.iceberg is not None:
        return (iceberg_package(),)
    return () if config.sink.delta is None else (delta_package(),)
