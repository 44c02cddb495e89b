"""Checkpoints of Delta tables that we commit to ourselves, so that nobody has to read their logs from the beginning.

Delta writes them, and takes away with that what is too old of the log. Nothing depends on them.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession


def write_checkpoint(spark: SparkSession, path: Path) -> None:
    """Have Delta write a checkpoint of the table as it is now."""
    jvm = spark._jvm  # noqa: SLF001 Delta has no other door to its log
    assert jvm is not None
    nothing = getattr(getattr(jvm.scala, "None$"), "MODULE$")
    log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(path))  # noqa: SLF001
    log.checkpoint(log.update(False, nothing, nothing), nothing)
