"""Start the streaming query that triggers epochs, report the error that ended it, and check that Spark,
target and source work.

These health checks run after an error of a table, before the error counts against the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock import storage
from penstock.config.model import PipelineConfig
from penstock.errors import EnvironmentUnfitError, SinkError, WorkerStartError, parse_error
from penstock.position import Position
from penstock.postgres.connection import SourceAddress, connect
from penstock.spark.control import CONTROL_FORMAT, ControlSource

_ONCE_QUIET_SECONDS = 0.2
_LOST_WORKER = (
    "Python worker failed to connect back",
    "Python worker exited unexpectedly",
    "Broken pipe",
    "EOFException",
    "Connection reset",
)


def start_query(
    spark: SparkSession, config: PipelineConfig, apply: Callable[[Position], None], *, once: bool
) -> StreamingQuery:
    """Start the streaming query, which calls `apply` with the end position of each batch."""
    checkpoint = config.checkpoint
    options = config.capture_settings(quiet_seconds=_ONCE_QUIET_SECONDS if once else None).to_options()

    def apply_batch(_: DataFrame, batch: int) -> None:
        apply(planned_end(checkpoint, batch))

    spark.dataSource.register(ControlSource)
    stream = spark.readStream.format(CONTROL_FORMAT).options(**options)
    stream = stream.option("maxRowsPerBatch", str(config.max_rows_per_epoch)).option("run", uuid4().hex)
    stream = stream.option("barriers", str(config.barriers))
    writer = stream.load().writeStream.foreachBatch(apply_batch).queryName(f"penstock {config.pipeline}")
    trigger = f"{int(config.trigger_seconds * 1000)} milliseconds"
    return writer.option("checkpointLocation", str(checkpoint)).trigger(processingTime=trigger).start()


def await_end(query: StreamingQuery) -> None:
    """Wait for the end of the query, and raise the error that ended it: the `PenstockError` that Spark
    wrapped, if there is one.
    """
    try:
        query.awaitTermination()
    except PySparkException as error:
        found = parse_error(str(error))
        if found is None and any(words in str(error) for words in _LOST_WORKER):
            found = WorkerStartError(
                "a Python worker process of Spark ended, or did not start within Spark's time limit"
            )
        if found is None:
            raise
        raise found from error


def planned_end(checkpoint: Path, batch: int) -> Position:
    """Return the end position of a batch. It is in the offset log that Spark wrote before the batch
    started.
    """
    lines = storage.read_text(checkpoint / "offsets" / str(batch)).splitlines()
    return Position.parse(json.loads(lines[2])["position"])


def is_spark_alive(spark: SparkSession) -> bool:
    context: Any = spark.sparkContext
    try:
        return not context._jsc.sc().isStopped()  # noqa: SLF001 - pyspark has no public API for this
    except (Py4JError, OSError, AttributeError):  # the JVM does not answer, or Python stopped the session
        return False


def spark_lost() -> EnvironmentUnfitError:
    return EnvironmentUnfitError(
        "the Spark session has ended: its JVM was stopped, ran out of memory or was killed",
        hint="start the pipeline again; if it happens again, see Spark's log and raise spark.driver.memory",
    )


@dataclass(frozen=True, slots=True)
class SharedHealth:
    """The health checks. `check` raises an error if Spark, the target or the source does not work."""

    spark: SparkSession
    root: Path
    address: SourceAddress

    def check(self) -> None:
        if not is_spark_alive(self.spark):
            raise spark_lost()
        if not storage.is_directory(self.root):
            raise SinkError(
                f"the target directory {self.root} does not exist; is its volume mounted?",
                hint=f"mount the volume of {self.root}",
            )
        with connect(self.address):
            pass
