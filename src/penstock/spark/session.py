"""A SparkSession with the settings that Penstock's streams and sinks need.

All of them must be in the SparkConf before the JVM starts: several (Delta's snapshot partitions among them) are not seen by other sessions
of the same application when they are set later.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from penstock.errors import EnvironmentUnfitError
from penstock.secret import Secret
from penstock.spark.java import ensure_java, own_temporary_dir
from penstock.spool import storage

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Spark keeps what a UI would show, plans and all, whether or not there is one: by default of the last 1,000 queries, jobs and stages.
    "spark.sql.ui.retainedExecutions": "20",
    "spark.ui.retainedJobs": "100",
    "spark.ui.retainedStages": "100",
    "spark.ui.retainedTasks": "1000",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.adaptive.enabled": "true",
    # Epochs are short and snapshots long; neither is to wait until the other has ended.
    "spark.scheduler.mode": "FAIR",
    "spark.sql.execution.arrow.localRelationThreshold": "0",
    # A control batch carries no rows, so there is nothing to gain from keeping many of its logs.
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.sql.streaming.metricsEnabled": "false",
    # A run that is killed while it writes its first offset leaves a temporary file behind, which must not keep the next one from starting.
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
    # Delta keeps the tables that it was last asked about for an hour: by default 10,000 of them, at some MB each.
    "spark.databricks.delta.delta.log.cacheSize": "16",
}


SHORT_LIVED = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"}
"""For a JVM that lives for a minute, as in the demo and in tests: compile quickly, not thoroughly. It saves a quarter of the time there.

Without the second setting, the first shrinks the room for compiled code to a fifth, and when that is full, calls fail in odd places.
"""


_LONGEST_SOCKET_DIRECTORY = 60
"""In bytes: the whole path of a socket has at most 107, and Spark's names take 42."""

_SECRET_NAME = re.compile("(?i)secret|password|token|access[.]?key")
"""Spark's own idea of a setting that is not to be shown (`spark.redaction.regex`). One that is given in clear is no argument either."""

_GATEWAY = "PYSPARK_GATEWAY_PORT"
"""By which spark-submit tells a Python program where its JVM is."""


def build_session(
    app_name: str,
    *,
    master: str | None = None,
    packages: Sequence[str] = (),
    conf: Mapping[str, str | Secret] | None = None,
    log: Path | None = None,
) -> SparkSession:
    """Start (or join) the Spark application of this process. `packages` are Maven coordinates; `conf` wins over our settings.

    Without a `master`, it is the one that spark-submit was given; in a process that spark-submit did not start, this machine. What only
    counts before the JVM starts, `packages` too, is for spark-submit's own options there. A secret in `conf` reaches the JVM once it runs,
    and never as an argument of its process.

    With `log`, everything that the JVM and its workers print goes to that file instead of the terminal.
    """
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = dict(_SETTINGS)
    if master is None and _GATEWAY not in os.environ:
        master = "local[*]"
    if master is not None and master.startswith("local"):
        settings |= _LOCAL_CHECKPOINTS | _unix_sockets() | {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if any("delta-spark" in package for package in packages):
        settings |= _DELTA_SETTINGS
    if packages:
        settings["spark.jars.packages"] = ",".join(packages)
    if master is not None:
        settings["spark.master"] = master
    given = conf or {}
    secrets = {name: value.reveal() for name, value in given.items() if isinstance(value, Secret)}
    secrets |= {name: value for name, value in given.items() if isinstance(value, str) and _SECRET_NAME.search(name)}
    settings |= {name: value for name, value in given.items() if isinstance(value, str) and name not in secrets}
    if secrets:
        settings.setdefault("spark.redaction.regex", "|".join([_SECRET_NAME.pattern, *map(re.escape, sorted(secrets))]))
    builder = SparkSession.builder.appName(app_name)
    is_first = SparkContext._active_spark_context is None  # noqa: SLF001
    with _stderr_to(log):
        if secrets and is_first:
            _start_jvm(settings)
        for name, value in {**settings, **secrets}.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
    # What goes wrong in a query or a task reaches the caller as an exception; the JVM's own account of it is only noise beside that.
    session.sparkContext.setLogLevel("FATAL")
    if is_first and (session.sparkContext.master or "").startswith("local"):
        _leave_out_checksums(session)
    return session


def _start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM with settings that are no secrets: PySpark passes all that it has before the JVM runs as arguments of the process."""
    made = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        made.set(name, value)
    SparkContext._ensure_initialized(conf=made)  # noqa: SLF001 - what the first SparkContext does itself


def _unix_sockets() -> dict[str, str]:
    """Sockets between the JVM and Python in a directory of this user; they save some 80 ms of every micro-batch.

    Spark does not authenticate clients of such a socket, and would create it in the temporary directory, for any user to connect.
    On a cluster no such directory exists on every machine: there, workers talk over TCP, with a secret.
    """
    directory = own_temporary_dir()
    if directory is None or len(os.fsencode(directory)) > _LONGEST_SOCKET_DIRECTORY:
        return {}
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": str(directory)}


def _leave_out_checksums(session: SparkSession) -> None:
    """On a disk, Hadoop puts a file of checksums beside each file, and starts a process, chmod, for each of the two.

    The second is 20 ms of every epoch of an Iceberg table, and nearly as much of the stream's own records. What is given up: Hadoop's own
    readers would find out that a disk has altered such a file. Nobody else looks at them, and most file systems know none.
    """
    context: Any = session.sparkContext
    jvm, conf = context._jvm, context._jsc.hadoopConfiguration()  # noqa: SLF001
    jvm.org.apache.hadoop.fs.FileSystem.get(jvm.java.net.URI.create("file:///"), conf).setWriteChecksum(False)


@contextmanager
def _stderr_to(log: Path | None) -> Iterator[None]:
    """A JVM that is started inside inherits the file as its standard error, and keeps it."""
    if log is None:
        yield
        return
    storage.make_directory(log.parent)
    sys.stderr.flush()
    terminal = os.dup(2)
    try:
        storage.ensure_file(log)
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    except Exception as error:
        raise EnvironmentUnfitError(f"Spark did not start: {type(error).__name__}", hint=f"see {log}") from error
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
