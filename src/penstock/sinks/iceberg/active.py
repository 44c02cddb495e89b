"""Which session Iceberg takes its settings and catalogs from: not the one that calls it, but the one that is active in the thread.

That may be any other of the application, by whatever was done there before; or none, and then what one session is told another is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Within, the session is the active one of this thread."""
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark's own door to the JVM
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)  # noqa: SLF001
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()
