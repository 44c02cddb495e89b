"""Health of the things that all tables share: the Spark session, the target's root, the source.

Asked when a table has failed, before the failure counts against that table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from penstock.errors import EnvironmentUnfitError, SinkError
from penstock.postgres.connection import SourceAddress, connect


def is_spark_alive(spark: SparkSession) -> bool:
    context: Any = spark.sparkContext
    try:
        return not context._jsc.sc().isStopped()  # noqa: SLF001 - pyspark's own door to the JVM
    except (Py4JError, OSError, AttributeError):  # the JVM does not answer, or the session was stopped by Python
        return False


def spark_lost() -> EnvironmentUnfitError:
    return EnvironmentUnfitError(
        "the Spark session has ended: its JVM was stopped, ran out of memory or was killed",
        hint="start the pipeline again; if it happens again, see Spark's log and raise spark.driver.memory",
    )


@dataclass(frozen=True, slots=True)
class SharedHealth:
    """`check` raises what is wrong, if anything is."""

    spark: SparkSession
    root: Path
    address: SourceAddress

    def check(self) -> None:
        if not is_spark_alive(self.spark):
            raise spark_lost()
        if not self.root.is_dir():
            raise SinkError(
                f"the target directory {self.root} does not exist; is its volume mounted?", hint=f"mount the volume of {self.root}"
            )
        with connect(self.address):
            pass
