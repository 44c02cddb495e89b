"""A lock that lives exactly as long as the JVM.

When the Python driver is killed, its JVM goes on for some moments and may still finish a commit. A lock held by Python would be free by
then; one held by the JVM keeps the next run away until nothing of the last one can write any more.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from penstock.errors import PipelineBusyError
from penstock.spool import storage


@contextmanager
def jvm_lock(spark: SparkSession, path: Path, timeout_seconds: float) -> Iterator[None]:
    """Hold the file lock at `path` for the length of the block; `PipelineBusyError` if another JVM keeps it for longer than that."""
    storage.make_directory(path.parent)
    storage.ensure_file(path)
    deadline = time.monotonic() + timeout_seconds
    jvm = spark.sparkContext._jvm  # noqa: SLF001 - the only way there; pyspark's own modules use it too
    assert jvm is not None
    file = jvm.java.io.RandomAccessFile(str(path), "rw")
    try:
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise PipelineBusyError(
                    f"another run, or a verify that brings a stopped pipeline up to date, holds {path}; it was still there after "
                    f"{timeout_seconds:.0f} s",
                    hint="wait for it to end, or stop it; pipelines that share a spool must have names of their own",
                )
            time.sleep(0.1)
        yield
    finally:
        file.close()


def _try_lock(file: Any) -> bool:
    try:
        return file.getChannel().tryLock() is not None
    except Py4JJavaError as error:
        # Java's word for a lock that this very JVM holds, by another channel.
        if "OverlappingFileLockException" not in str(error.java_exception):
            raise
        return False


def is_locked(path: Path) -> bool:
    """Whether a JVM holds the lock now. Needs no JVM of one's own."""
    try:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):
        return True
    return False
