"""A rewrite of an Iceberg table: some of its files become others that hold the same rows, while epochs go on.

Iceberg's own action plans, writes and commits at once, and under a steady load it loses the commit time and again to epochs that come
faster than it tries. So its parts are used one by one: its plan, its way to read files with their deletes and write them as others, and its
commit, which is made by itself when no epoch is under way. The new files count as old as the table was when they were read, so deletes
that came since reach into them.

Most of what is rewritten is small files of epochs that hold rows as they are. Those are put together by an executor with pyarrow, which
takes a tenth of what Spark takes to read them as rows and write them again. And they are put together by size, so that a file is not
written again for every few small ones that come: only once the others come to as much as it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from threading import Lock
from typing import Any
from uuid import uuid4

from pyspark.sql import SparkSession

from penstock.sinks.iceberg.active import active
from penstock.sinks.iceberg.catalog import LoadedTable
from penstock.sinks.iceberg.scan import delete_files, each

_OPTIONS = {"delete-file-threshold": "1", "min-input-files": "1"}
_FORMAT = "PARQUET"
_TINY_BYTES = 1 << 20
_MERGED_BYTES = 64 << 20
_WITHOUT_ROW_NUMBERS = 2
"""In later formats every row has a number, which Spark takes along."""

Merge = Callable[[LoadedTable, Sequence[str]], "Any | None"]
"""Puts the rows of these files of a table into one, which Java has as a `DataFile`; None if there is more to it than that."""


def rewrite_files(spark: SparkSession, table: LoadedTable, small_bytes: int, turn: Lock, merge: Merge) -> None:
    """Files with deletes become such without; those below `small_bytes` are put together. While `turn` is held, no epoch commits."""
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark's own door to the JVM
    table.java.refresh()
    snapshot = table.java.currentSnapshot()
    if snapshot is None:
        return
    commits = jvm.org.apache.iceberg.actions.RewriteDataFilesCommitManager(table.java, snapshot.snapshotId(), True)
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
        with turn:
            commits.commitOrClean(groups)
    _take_out_idle(jvm, table, turn)


def _planned(jvm: Any, table: LoadedTable, snapshot: int, small_bytes: int) -> list[Any]:
    def plan(below: int) -> list[Any]:
        everything = jvm.org.apache.iceberg.expressions.Expressions.alwaysTrue()
        planner = jvm.org.apache.iceberg.actions.BinPackRewriteFilePlanner(table.java, everything, snapshot, True)
        planner.init({**_OPTIONS, "min-file-size-bytes": str(below)})
        with closing(planner.plan().groups()) as groups:
            return list(each(groups.iterator()))

    planned = plan(small_bytes)
    tasks = [task for group in planned for task in each(group.fileScanTasks().iterator())]
    below = small_enough([int(task.file().fileSizeInBytes()) for task in tasks if task.deletes().isEmpty()], small_bytes)
    return planned if below == small_bytes else plan(below)


def small_enough(sizes: Sequence[int], limit: int) -> int:
    """Below which size files are put together: not the largest, while it is larger than all others, and some more, taken together."""
    kept, total = sorted(sizes), sum(sizes)
    while kept and kept[-1] > total - kept[-1] + _TINY_BYTES:
        limit = kept.pop()
        total -= limit
    return limit


def _merged(jvm: Any, table: LoadedTable, group: Any, merge: Merge) -> Any:
    """What becomes of files of Parquet that hold rows as they are, if they make one file and are few enough for one task; else None."""
    now = table.java.operations().current()  # which may be other than what was loaded, by somebody's ALTER TABLE
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
    """The new files, as Java has them: written by Spark, and not part of the table yet."""
    jvm: Any = spark._jvm  # noqa: SLF001
    iceberg, name = jvm.org.apache.iceberg.spark, str(uuid4())
    tasks, files = iceberg.ScanTaskSetManager.get(), iceberg.FileRewriteCoordinator.get()
    tables = _table_cache(spark, tasks.getClass().getClassLoader())
    session = spark.newSession()
    # It might write fewer files than were planned, and larger ones.
    session.conf.set("spark.sql.adaptive.enabled", "false")
    tables.add(name, table.java)
    tasks.stageTasks(table.java, name, group.fileScanTasks())
    try:
        with active(session):
            rows = session.read.format("iceberg").option("split-size", group.inputSplitSize()).option("file-open-cost", "0").load(name)
            write = rows.write.format("iceberg").option("target-file-size-bytes", group.maxOutputFileSize())
            write.option("distribution-mode", "none").option("output-spec-id", group.outputSpecId()).mode("append").save(name)
        return files.fetchNewFiles(table.java, name)
    finally:
        tables.remove(name)
        tasks.removeTasks(table.java, name)
        files.clearRewrite(table.java, name)


def _table_cache(spark: SparkSession, loader: Any) -> Any:
    """Where a table is found by the name that a rewrite has. Its class has two methods `get`, and py4j takes the wrong one."""
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001
    lang = gateway.jvm.java.lang
    get = loader.loadClass("org.apache.iceberg.spark.SparkTableCache").getMethod("get", gateway.new_array(lang.Class, 0))
    return get.invoke(None, gateway.new_array(lang.Object, 0))


def _take_out_idle(jvm: Any, table: LoadedTable, turn: Lock) -> None:
    """Take out the deletes that no file of the table is read with. Files that are added later are never read with older deletes."""
    table.java.refresh()
    with closing(table.java.newScan().planFiles()) as tasks:
        used = {str(file.location()) for task in each(tasks.iterator()) for file in each(task.deletes().iterator())}
    idle = [file for file in delete_files(jvm, table) if str(file.location()) not in used]
    if idle:
        update = table.java.newRewrite()
        for file in idle:
            update.deleteFile(file)
        with turn:
            update.commit()
