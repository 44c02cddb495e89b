"""A lock that lives exactly as long as the JVM.

When the Python driver is killed, its JVM goes on for some moments and may still finish a commit. A lock held by Python would be free by
then; one held by the JVM keeps the next run away until nothing of the last one can write any more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.errors import PipelineBusyError


@contextmanager
def jvm_lock(spark: SparkSession, path: Path, timeout_seconds: float) -> Iterator[None]:
    """Hold the file lock at `path` for the length of the block; `PipelineBusyError` if another JVM keeps it for longer than that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_seconds
    jvm = spark.sparkContext._jvm  # noqa: SLF001 - the only way there; pyspark's own modules use it too
    assert jvm is not None
    file = jvm.java.io.RandomAccessFile(str(path), "rw")
    try:
        while file.getChannel().tryLock() is None:
            if time.monotonic() > deadline:
                raise PipelineBusyError(f"another run holds {path}; it was still there after {timeout_seconds:.0f} s")
            time.sleep(0.1)
        yield
    finally:
        file.close()
