"""Checkpoints of Delta tables that we commit to ourselves, so that nobody has to read their logs from the beginning.

Delta writes them, and takes away with that what is too old of the log; here it is only seen that it does, beside the epochs, one table at a
time. Nothing depends on them: one that fails is tried again at the next epoch that is due.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.sinks.delta_state import newest_checkpoint

_log = logging.getLogger(__name__)

_COMMITS = 50
_POOL = "penstock-maintenance"


class DeltaCheckpoints:
    """`consider` is called by several threads."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._lock = threading.Lock()
        self._last: dict[Path, int] = {}
        self._thread: threading.Thread | None = None

    def consider(self, path: Path, version: int) -> None:
        """After a commit: have a checkpoint written if there was none for long, and nobody is at it."""
        with self._lock:
            if path not in self._last or self._last[path] > version:
                self._last[path] = newest_checkpoint(path)
            is_busy = self._thread is not None and self._thread.is_alive()
            if version - self._last[path] < _COMMITS or is_busy:
                return
            self._last[path] = version
            self._thread = threading.Thread(target=self._write, args=(path,), name="penstock-checkpoint", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _write(self, path: Path) -> None:
        try:
            write_checkpoint(self._spark, path)
        except Exception:  # noqa: BLE001 the edge of a thread, whose work anybody can do again
            _log.warning("a checkpoint could not be written", extra={"path": str(path)}, exc_info=True)


def write_checkpoint(spark: SparkSession, path: Path) -> None:
    """Have Delta write a checkpoint of the table as it is now."""
    context, jvm = spark.sparkContext, spark._jvm  # noqa: SLF001 Delta has no other door to its log
    assert jvm is not None
    context.setLocalProperty("spark.scheduler.pool", _POOL)
    nothing = getattr(getattr(jvm.scala, "None$"), "MODULE$")
    log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(path))  # noqa: SLF001
    log.checkpoint(log.update(False, nothing, nothing), nothing)
