"""Maintenance of Iceberg tables: rewrite small files, expire snapshots, remove leftover files.

Every epoch leaves a small data file, and a snapshot, which the metadata of every later commit lists. An epoch
with updates also leaves an equality delete file, which every reader applies. When the number of delete files,
or of new data files, reaches a limit, a rewrite merges small files and removes deleted rows from data files.
It leaves out files whose bounds show that no delete matches them. Then it removes deletes that match no data
file. Old and surplus snapshots are expired. Files of failed epochs are searched for once a day. A rewrite
stores no position, because epochs may commit while it runs.

Most rewritten files are small files of epochs. An executor merges them with pyarrow in a tenth of the time
that Spark would need. They are merged by size: a file is merged only when all smaller files together are
about as large as it is.

Iceberg's own action for rewrites plans, writes and commits in one call. Under steady load, its commit fails
repeatedly because epochs commit first. So Penstock calls the parts of the action separately, and commits the
result while no epoch commits. New files get the sequence number that the table had when their rows were read,
so that later deletes apply to them.

An attempt at an epoch first loads the table and then writes its files. Its commit succeeds only if the
snapshot that it loaded is still the current one. So uncommitted files of epochs that are older than the
current snapshot will never be committed. Only a rewrite can commit files that are older than the current
snapshot, and the thread that runs rewrites is also the one that removes leftovers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4

from pyspark.sql import SparkSession

from penstock import storage
from penstock.errors import SinkError
from penstock.foreign import describe
from penstock.sinks.iceberg.catalog import LoadedTable, TableMovedError, active, translated_errors
from penstock.sinks.iceberg.files import MERGED
from penstock.sinks.iceberg.reader import delete_files, each

_FILES = ("epoch-*.parquet", f"{MERGED}-*.parquet")


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The epoch files found in a table's directory, and the table's snapshot right after the listing."""

    files: Mapping[str, Path]
    snapshot: int | None

    def are_settled(self, table: LoadedTable) -> bool:
        """Whether the found files that are not part of `table` can no longer become part of it. `table` must
        be refreshed.
        """
        return _snapshot(table) != self.snapshot

    def remove_unnamed(self, spark: SparkSession, name: str) -> int:
        """Remove all files that no snapshot of the table `name` refers to; returns their number."""
        spark.sql(f"REFRESH TABLE {name}")
        rows = spark.table(f"{name}.all_files").select("file_path").distinct().collect()
        unnamed = self.files.keys() - {str(row["file_path"]).rpartition("/")[2] for row in rows}
        for path in unnamed:
            storage.delete(self.files[path])
        return len(unnamed)


def owns_directory(table: LoadedTable) -> bool:
    """Whether the table's directory contains only its own files. In most catalogs a renamed table keeps its
    directory, so a new table of the former name may use the same directory.
    """
    return str(table.java.operations().getClass().getSimpleName()) == "HadoopTableOperations"


def find_files(table: LoadedTable, before: float) -> FoundFiles:
    """Find files of epochs in the table's directory that were last modified before the time `before`."""
    found = {
        path.name: path
        for pattern in _FILES
        for path in storage.list_paths(table.directory, pattern)
        if _written(path) < before
    }
    table.java.refresh()  # after the listing, so that files newer than the snapshot are not among those found
    return FoundFiles(found, _snapshot(table))


def _written(path: Path) -> float:
    try:
        return storage.modified_seconds(path)
    except FileNotFoundError:  # removed by its own attempt
        return math.inf


def _snapshot(table: LoadedTable) -> int | None:
    snapshot = table.java.currentSnapshot()
    return None if snapshot is None else int(snapshot.snapshotId())


_OPTIONS = {"delete-file-threshold": "1", "min-input-files": "1"}
_FORMAT = "PARQUET"
_TINY_BYTES = 1 << 20
_MERGED_BYTES = 64 << 20
_WITHOUT_ROW_NUMBERS = 2
"""The last format version without row ids. In later versions Spark rewrites all files, because it preserves
the row ids.
"""

Merge = Callable[[LoadedTable, Sequence[str]], "Any | None"]
"""Function that merges the given files of a table into one `DataFile` (Java). It returns None if that is not
possible.
"""


def rewrite_files(
    spark: SparkSession, table: LoadedTable, small_bytes: int, commit_lock: Lock, merge: Merge
) -> None:
    """Rewrite files with deletes, and merge files below `small_bytes`. No epoch commits while `commit_lock`
    is held.
    """
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark's access to the JVM
    table.java.refresh()
    snapshot = table.java.currentSnapshot()
    if snapshot is None:
        return
    commits = jvm.org.apache.iceberg.actions.RewriteDataFilesCommitManager(
        table.java, snapshot.snapshotId(), True
    )
    groups = jvm.java.util.HashSet()
    try:
        for group in _planned(jvm, table, snapshot.snapshotId(), small_bytes):
            group.setOutputFiles(_merged(jvm, table, group, merge) or _rewritten(spark, table, group))
            groups.add(group)
    except Exception:
        for group in each(groups.iterator()):
            commits.abortFileGroup(group)
        raise
    if not groups.isEmpty():
        with commit_lock:
            commits.commitOrClean(groups)
    _remove_unused_deletes(jvm, table, commit_lock)


def _planned(jvm: Any, table: LoadedTable, snapshot: int, small_bytes: int) -> list[Any]:
    def plan(below: int) -> list[Any]:
        everything = jvm.org.apache.iceberg.expressions.Expressions.alwaysTrue()
        planner = jvm.org.apache.iceberg.actions.BinPackRewriteFilePlanner(
            table.java, everything, snapshot, True
        )
        planner.init({**_OPTIONS, "min-file-size-bytes": str(below)})
        with closing(planner.plan().groups()) as groups:
            return list(each(groups.iterator()))

    planned = plan(small_bytes)
    tasks = [task for group in planned for task in each(group.fileScanTasks().iterator())]
    below = small_enough(
        [int(task.file().fileSizeInBytes()) for task in tasks if task.deletes().isEmpty()], small_bytes
    )
    return planned if below == small_bytes else plan(below)


def small_enough(sizes: Sequence[int], limit: int) -> int:
    """The size below which files are merged, at most `limit`. The largest file is left out as long as it
    exceeds the total size of all smaller files by more than 1 MiB.
    """
    kept, total = sorted(sizes), sum(sizes)
    while kept and kept[-1] > total - kept[-1] + _TINY_BYTES:
        limit = kept.pop()
        total -= limit
    return limit


def _merged(jvm: Any, table: LoadedTable, group: Any, merge: Merge) -> Any:
    """Merge the files of a group. Returns None unless they are Parquet files without deletes that fit into
    one task and make one file.
    """
    now = table.java.operations().current()  # may differ from the loaded table after an ALTER TABLE
    if int(now.formatVersion()) > _WITHOUT_ROW_NUMBERS or now.spec().isPartitioned():
        return None
    if int(group.inputFilesSizeInBytes()) > min(_MERGED_BYTES, int(group.maxOutputFileSize())):
        return None
    tasks = list(each(group.fileScanTasks().iterator()))
    if not all(task.deletes().isEmpty() and str(task.file().format()) == _FORMAT for task in tasks):
        return None
    made = merge(table, [str(task.file().location()) for task in tasks])
    if made is None:
        return None
    files = jvm.java.util.HashSet()
    files.add(made)
    return files


def _rewritten(spark: SparkSession, table: LoadedTable, group: Any) -> Any:
    """Let Spark rewrite the files of a group. Returns the new files as Java objects, not yet part of the
    table.
    """
    jvm: Any = spark._jvm  # noqa: SLF001
    iceberg, name = jvm.org.apache.iceberg.spark, str(uuid4())
    tasks, files = iceberg.ScanTaskSetManager.get(), iceberg.FileRewriteCoordinator.get()
    tables = _table_cache(spark, tasks.getClass().getClassLoader())
    session = spark.newSession()
    # Adaptive execution might write fewer and larger files than planned.
    session.conf.set("spark.sql.adaptive.enabled", "false")
    tables.add(name, table.java)
    tasks.stageTasks(table.java, name, group.fileScanTasks())
    try:
        with active(session):
            rows = (
                session.read.format("iceberg")
                .option("split-size", group.inputSplitSize())
                .option("file-open-cost", "0")
                .load(name)
            )
            write = rows.write.format("iceberg").option("target-file-size-bytes", group.maxOutputFileSize())
            write.option("distribution-mode", "none").option("output-spec-id", group.outputSpecId()).mode(
                "append"
            ).save(name)
        return files.fetchNewFiles(table.java, name)
    finally:
        tables.remove(name)
        tasks.removeTasks(table.java, name)
        files.clearRewrite(table.java, name)


def _table_cache(spark: SparkSession, loader: Any) -> Any:
    """The cache that resolves the name of a rewrite. Its class has two methods `get`, and py4j picks the
    wrong one.
    """
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001
    lang = gateway.jvm.java.lang
    get = loader.loadClass("org.apache.iceberg.spark.SparkTableCache").getMethod(
        "get", gateway.new_array(lang.Class, 0)
    )
    return get.invoke(None, gateway.new_array(lang.Object, 0))


def _remove_unused_deletes(jvm: Any, table: LoadedTable, commit_lock: Lock) -> None:
    """Remove delete files that apply to no data file of the table. Such a delete file never applies to files
    that are added later either.
    """
    table.java.refresh()
    with closing(table.java.newScan().planFiles()) as tasks:
        used = {
            str(file.location())
            for task in each(tasks.iterator())
            for file in each(task.deletes().iterator())
        }
    idle = [file for file in delete_files(jvm, table) if str(file.location()) not in used]
    if idle:
        update = table.java.newRewrite()
        for file in idle:
            update.deleteFile(file)
        with commit_lock:
            update.commit()


_log = logging.getLogger(__name__)

_REST = 10
"""Factor of the pause after a rewrite, so that rewrites take at most a tenth of the time, however large the
table is.
"""
EXPIRE_EVERY = 100
KEPT_SNAPSHOTS = 5
"""The number of snapshots to keep regardless of age. They keep the position readable when other writers
commit after Penstock.
"""
_CLEANUP_SECONDS = 86_400.0
"""Interval of the search for leftover files, which lists every file that the table refers to."""

_SMALL_BYTES = 16 * 1024 * 1024
"""Files below this size are merged. Larger ones are rewritten only to remove deleted rows."""
_TARGET_BYTES = ("write.target-file-size-bytes", 512 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Maintenance:
    """The limits at which maintenance of a table is due."""

    delete_files: int = 64
    """Number of delete files, or of new data files, after which files are rewritten; 0: never."""
    keep_seconds: float = 3600.0
    """Age from which snapshots expire."""
    expire_every: int = EXPIRE_EVERY
    """Number of new snapshots after which old ones are expired; 0: never."""
    versions: int = 1000
    """Maximum number of snapshots to keep. Snapshots younger than `hold_seconds` are kept in any case."""
    hold_seconds: float = 600.0


class Maintainer:
    """Maintains one table. Used by one thread; the thread that applies epochs holds `commit_lock` while it
    commits.
    """

    def __init__(
        self, spark: SparkSession, name: str, maintenance: Maintenance, commit_lock: Lock, merge: Merge
    ) -> None:
        """`name` is the table's SQL name."""
        self._spark = spark
        self._name = name
        self._maintenance = maintenance
        self._commit_lock = commit_lock
        self._merge = merge
        self._rests_until = 0.0
        self._kept = 0
        self._data_files = 0
        self._found: FoundFiles | None = None
        self._next_cleanup = 0.0

    def is_due(self, table: LoadedTable) -> bool:
        """Whether a rewrite, or an expiry of snapshots, is due."""
        return self._is_slow(table) or self._is_long(table)

    def maintain(self, table: LoadedTable) -> None:
        """Do the maintenance that is due. A step that fails is logged, and tried again at a later call. No
        row depends on maintenance.
        """
        for is_due, work in ((self._is_long, self._expire), (self._is_slow, self._rewrite)):
            try:
                if is_due(table):
                    work(table)
            except (SinkError, TableMovedError) as error:
                _log.warning(
                    "table not maintained", extra={"location": table.location, "error": describe(error)}
                )

    def _is_slow(self, table: LoadedTable) -> bool:
        count = max(table.delete_files or 0, table.data_files - self._data_files)
        return 0 < self._maintenance.delete_files <= count and time.monotonic() >= self._rests_until

    def _rewrite(self, table: LoadedTable) -> None:
        started = time.monotonic()
        try:
            with translated_errors(f"rewriting {table.location}"):
                self._rewrite_files(table)
        finally:
            # Pause also after a failure: a rewrite that was stopped because it took too long would otherwise
            # restart at once, again and again.
            took = time.monotonic() - started
            self._rests_until = time.monotonic() + _REST * took
        _log.info("table rewritten", extra={"location": table.location, "seconds": round(took, 3)})

    def _rewrite_files(self, table: LoadedTable) -> None:
        rewrite_files(self._spark, table, _small_bytes(table), self._commit_lock, self._merge)
        table.java.refresh()
        self._data_files = int(table.java.currentSnapshot().summary().get("total-data-files") or 0)

    def _is_long(self, table: LoadedTable) -> bool:
        every = self._maintenance.expire_every
        return bool(every) and len(table.base.snapshots()) >= self._kept + every

    def _expire(self, table: LoadedTable) -> None:
        with translated_errors(f"expiring snapshots of {table.location}"):
            table.java.refresh()
            before = int(self._oldest_kept(table) * 1000)
            table.java.expireSnapshots().expireOlderThan(before).retainLast(KEPT_SNAPSHOTS).cleanExpiredFiles(
                True
            ).commit()
            table.java.refresh()
            self._kept = len(table.java.operations().current().snapshots())
            self._remove_leftovers(table)

    def _remove_leftovers(self, table: LoadedTable) -> None:
        """Find files of unfinished epochs. A later call removes those of them that are not part of the table
        at that time.
        """
        if not owns_directory(table):
            return
        if self._found is None and time.monotonic() >= self._next_cleanup:
            self._found = find_files(
                table, time.time() - max(self._maintenance.keep_seconds, self._maintenance.hold_seconds)
            )
        elif self._found is not None and self._found.are_settled(table):
            removed = self._found.remove_unnamed(self._spark, self._name)
            self._found, self._next_cleanup = None, time.monotonic() + _CLEANUP_SECONDS
            _log.info(
                "files of unfinished epochs removed", extra={"location": table.location, "files": removed}
            )

    def _oldest_kept(self, table: LoadedTable) -> float:
        """The time before which snapshots expire."""
        chosen, now = self._maintenance, time.time()
        found = table.java.operations().current().snapshots()
        beyond = len(found) - chosen.versions
        crowded = 0.0 if beyond <= 0 else found[beyond].timestampMillis() / 1000
        return max(now - chosen.keep_seconds, min(crowded, now - chosen.hold_seconds))


def _small_bytes(table: LoadedTable) -> int:
    """The size below which files are merged. Iceberg's default, three quarters of the target file size, would
    rewrite most of a table each time.
    """
    name, default = _TARGET_BYTES
    return min(_SMALL_BYTES, int(table.base.properties().get(name) or default) * 3 // 4)
