"""Build a SparkSession with the settings that Penstock needs, and a file lock held by the JVM.

When the Python driver is killed, its JVM runs on for a moment and may still finish a commit. A lock held by
Python would be released too early. A lock held by the JVM keeps the next run waiting until the old JVM can no
longer write.

All settings must be in the SparkConf before the JVM starts: other sessions of the application do not see some
of them (such as Delta's snapshotPartitions) if they are set later.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from penstock import storage
from penstock.errors import EnvironmentUnfitError, PipelineBusyError
from penstock.secret import Secret
from penstock.spark.java import ensure_java
from penstock.storage.locks import exclusive
from penstock.storage.temporary import user_cache_directory, user_temporary_directory


@contextmanager
def jvm_lock(spark: SparkSession, path: Path, timeout_seconds: float) -> Iterator[None]:
    """Hold the file lock at `path` during the block. Raises `PipelineBusyError` if another JVM holds it
    longer than the timeout.
    """
    storage.ensure_directory(path.parent)
    storage.ensure_file(path)
    deadline = time.monotonic() + timeout_seconds
    jvm = spark.sparkContext._jvm  # noqa: SLF001 - no public accessor; pyspark's own modules use it too
    assert jvm is not None
    file = jvm.java.io.RandomAccessFile(str(path), "rw")
    try:
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise PipelineBusyError(
                    f"{path} is locked by another run, or by a verify of the stopped pipeline; the lock "
                    "was not released within "
                    f"{timeout_seconds:.0f} s",
                    hint="wait for it to end, or stop it; pipelines that share a spool must have different "
                    "names",
                )
            time.sleep(0.1)
        yield
    finally:
        file.close()


def _try_lock(file: Any) -> bool:
    try:
        return file.getChannel().tryLock() is not None
    except Py4JJavaError as error:
        # Java raises this if the same JVM holds the lock through another channel.
        if "OverlappingFileLockException" not in str(error.java_exception):
            raise
        return False


_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Even without its UI, Spark keeps the data for the UI, including plans. Its default is to keep the last
    # 1,000 queries, jobs and stages.
    "spark.sql.ui.retainedExecutions": "20",
    "spark.ui.retainedJobs": "100",
    "spark.ui.retainedStages": "100",
    "spark.ui.retainedTasks": "1000",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.adaptive.enabled": "true",
    # Epochs are short and snapshots long; neither should wait for the other.
    "spark.scheduler.mode": "FAIR",
    "spark.sql.execution.arrow.localRelationThreshold": "0",
    # Batches of the control stream have no rows, so the logs of only a few batches are worth keeping.
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.sql.streaming.metricsEnabled": "false",
    # A run that is killed while it writes its first offset leaves a temporary file. The file must not prevent
    # the next start.
    "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
}

_LOCAL_CHECKPOINTS = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}

_DELTA_SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.databricks.delta.properties.defaults.enableDeletionVectors": "true",
    "spark.databricks.delta.stalenessLimit": "0",
    # Delta caches up to 10,000 recently used tables for an hour by default, at some MB each.
    "spark.databricks.delta.delta.log.cacheSize": "16",
}


SHORT_LIVED = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"}
"""Settings for a JVM that runs for a minute, as in the demo and in tests. They make it compile quickly
instead of thoroughly, which saves a quarter of the time.

`TieredStopAtLevel=1` alone reduces the code cache to a fifth of its size, and calls fail in unexpected places
when the cache is full. `ReservedCodeCacheSize` restores the size.
"""


_LONGEST_SOCKET_DIRECTORY = 60
"""In bytes: a socket path has at most 107 bytes, of which Spark's file name takes 42."""

_SECRET_NAME = re.compile("(?i)secret|password|token|access[.]?key")
"""Names of settings that Spark considers secret (`spark.redaction.regex`). Such a value is never passed as an
argument, even if it is not a `Secret`.
"""

_IVY_DIRECTORY = ".ivy2.5.2"
"""Spark's default for `spark.jars.ivy`, in the home directory."""

_GATEWAY = "PYSPARK_GATEWAY_PORT"
"""The environment variable in which spark-submit passes the JVM's port to a Python program."""


def build_session(
    app_name: str,
    *,
    master: str | None = None,
    packages: Sequence[str] = (),
    conf: Mapping[str, str | Secret] | None = None,
    log: Path | None = None,
) -> SparkSession:
    """Start or join the Spark application of this process. `packages` are Maven coordinates; `conf` overrides
    the defaults.

    Without `master`, spark-submit's master is used, or `local[*]` if spark-submit did not start this process.
    Under spark-submit, pass settings that only apply before the JVM starts, including `packages`, as options
    of spark-submit. A secret in `conf` is set after the JVM has started, and is never a process argument.

    With `log`, all output of the JVM and its workers goes to that file instead of the terminal.
    """
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = dict(_SETTINGS)
    if master is None and _GATEWAY not in os.environ:
        master = "local[*]"
    if master is not None and master.startswith("local"):
        settings |= (
            _LOCAL_CHECKPOINTS
            | _unix_sockets()
            | {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        )
    if any("delta-spark" in package for package in packages):
        settings |= _DELTA_SETTINGS
    if packages:
        settings["spark.jars.packages"] = ",".join(packages)
    if master is not None:
        settings["spark.master"] = master
    given = conf or {}
    secrets = {name: value.reveal() for name, value in given.items() if isinstance(value, Secret)}
    secrets |= {
        name: value for name, value in given.items() if isinstance(value, str) and _SECRET_NAME.search(name)
    }
    settings |= {
        name: value for name, value in given.items() if isinstance(value, str) and name not in secrets
    }
    if secrets:
        settings.setdefault(
            "spark.redaction.regex", "|".join([_SECRET_NAME.pattern, *map(re.escape, sorted(secrets))])
        )
    builder = SparkSession.builder.appName(app_name)
    is_first = SparkContext._active_spark_context is None  # noqa: SLF001
    with _stderr_to(log), one_download_at_a_time(settings):
        if secrets and is_first:
            _start_jvm(settings)
        for name, value in {**settings, **secrets}.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
    # Errors of queries and tasks reach the caller as exceptions, so the JVM's own log of them is redundant.
    session.sparkContext.setLogLevel("FATAL")
    if is_first and (session.sparkContext.master or "").startswith("local"):
        _leave_out_checksums(session)
    return session


@contextmanager
def one_download_at_a_time(settings: Mapping[str, str]) -> Iterator[None]:
    """Keep other processes of this user from downloading Spark packages during the block.

    Spark's package manager, Ivy, does not lock its cache: if two JVMs download the same file, both fail. If
    all packages of `settings` are already in the cache, this waits for a running download, but does not
    prevent downloads during the block.
    """
    coordinates = [
        each.strip() for each in settings.get("spark.jars.packages", "").split(",") if each.strip()
    ]
    cache = user_cache_directory()
    starts_jvm = SparkContext._gateway is None and _GATEWAY not in os.environ  # noqa: SLF001
    if not coordinates or cache is None or not starts_jvm:
        yield
        return
    ivy = Path(settings.get("spark.jars.ivy", Path.home() / _IVY_DIRECTORY))
    with exclusive(cache / "spark-packages.lock"):
        if not all(storage.exists(ivy / "jars" / _jar_name(each)) for each in coordinates):
            yield
            return
    yield


def _jar_name(coordinate: str) -> str:
    """Return the name that Ivy gives the main jar of `group:artifact:version` in its directory `jars`."""
    group, _, rest = coordinate.partition(":")
    return f"{group}_{rest.replace(':', '-')}.jar"


def _start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM with `settings`, which must not contain secrets: PySpark passes all settings known at
    this point as process arguments.
    """
    made = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        made.set(name, value)
    SparkContext._ensure_initialized(conf=made)  # noqa: SLF001 - what the first SparkContext does itself


def _unix_sockets() -> dict[str, str]:
    """Settings that put the sockets between the JVM and Python into a directory of this user; empty if there
    is no directory with a path that is short enough. Unix sockets save some 80 ms per micro-batch.

    Spark does not authenticate clients of such a socket. By default it creates the socket in the temporary
    directory, where any user can connect. On a cluster the directory does not exist on every machine; workers
    there use TCP with a secret.
    """
    directory = user_temporary_directory()
    if directory is None or len(os.fsencode(directory)) > _LONGEST_SOCKET_DIRECTORY:
        return {}
    return {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": str(directory),
    }


def _leave_out_checksums(session: SparkSession) -> None:
    """Do not write Hadoop's checksum files on local disks.

    Hadoop writes a checksum file next to each file, and starts a chmod process for each of the two files. The
    chmod of the checksum files costs 20 ms per epoch of an Iceberg table, and nearly as much per batch of the
    stream, for its logs. Without checksum files, Hadoop's readers no longer detect that a disk has corrupted
    a file. Other readers ignore these checksums, and Hadoop writes none on most other file systems.
    """
    context: Any = session.sparkContext
    jvm, conf = context._jvm, context._jsc.hadoopConfiguration()  # noqa: SLF001
    jvm.org.apache.hadoop.fs.FileSystem.get(jvm.java.net.URI.create("file:///"), conf).setWriteChecksum(False)


@contextmanager
def _stderr_to(log: Path | None) -> Iterator[None]:
    """Redirect standard error to the file; a JVM started in this block inherits it."""
    if log is None:
        yield
        return
    storage.ensure_directory(log.parent)
    sys.stderr.flush()
    terminal = os.dup(2)
    try:
        with storage.open_append(log) as file:
            os.dup2(file.fileno(), 2)
        yield
    except Exception as error:
        raise EnvironmentUnfitError(
            f"Spark did not start: {type(error).__name__}", hint=f"see {log}"
        ) from error
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
