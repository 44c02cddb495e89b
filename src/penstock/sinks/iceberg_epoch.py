"""The driver's part in an epoch of an Iceberg table: tasks for the executors, and the rows of the target that they turn out to need."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from uuid import uuid4

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from penstock.change import ChangeCounts
from penstock.errors import SinkError
from penstock.sinks.base import ChangedRows, SnapshotPlace, TableChanges
from penstock.sinks.executors import Executors, error_of_ours
from penstock.sinks.iceberg_catalog import NewFile, TableChange, ensure_catalog
from penstock.sinks.iceberg_files import (
    EpochFiles,
    EpochTask,
    RepairTask,
    Stored,
    Wanted,
    WrittenFile,
    named_columns,
    write_epoch,
    write_repair,
)
from penstock.sinks.iceberg_schema import delete_columns
from penstock.sinks.layout import CURRENT, Layout, Mode
from penstock.sinks.names import quoted
from penstock.sinks.slice_reader import Part

_ROWS_A_TASK = 500_000
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Files that pyarrow reads: times of any year, and none of Spark's oldest form of them.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}

Run = Callable[[Sequence[EpochTask]], list[EpochFiles]]


@dataclass(frozen=True, slots=True)
class EpochTarget:
    """The table that is written to: its name in SQL, its layout, the place for its files."""

    name: str
    layout: Layout
    place: SnapshotPlace


class EpochWriter:
    """Has files written for one epoch. They are nobody's until they are committed."""

    def __init__(self, spark: SparkSession, executors: Executors, catalog: str, warehouse: Path, scratch: Path) -> None:
        self._spark = spark
        self._executors = executors
        self._catalog = catalog
        self._warehouse = warehouse
        self._scratch = scratch

    def write(self, target: EpochTarget, changes: TableChanges) -> TableChange:
        """The files for `changes`, and what they do to the table."""
        parts = _parts(target.layout.mode, changes.counts, self._executors.parallelism)
        task = EpochTask(tuple(changes.slices), target.layout, target.place, "")
        return self._settled(target, task, parts, lambda tasks: self._executors.run(write_epoch, tasks))

    def repair(self, target: EpochTarget, changed: ChangedRows) -> TableChange:
        """The same for rows that are to be replaced."""
        task = EpochTask((), target.layout, target.place, "")
        return self._settled(
            target, task, 1, lambda tasks: self._executors.run(write_repair, [RepairTask(changed, each) for each in tasks])
        )

    def _settled(self, target: EpochTarget, task: EpochTask, parts: int, run: Run) -> TableChange:
        scratch = self._scratch / uuid4().hex
        try:
            task = replace(task, scratch=str(scratch))
            while True:
                tasks = [replace(task, part=Part(index, parts)) for index in range(parts)] if parts > 1 else [task]
                found = run(tasks)
                wanted = [each.wanted for each in found if each.wanted is not None]
                if not wanted:
                    return _change(found, delete_columns(target.place.schema, named_columns(target.layout)))
                discard(target.place, _change(found, ()))
                # Rows that a delete takes without need may be meant by another part's: then one task does it all.
                parts = parts if all(each.is_old for each in wanted) else 1
                rows = [each for each in wanted if each.is_old == wanted[0].is_old]
                stored = self._fetch(target, rows, scratch / uuid4().hex)
                task = replace(task, old=stored) if rows[0].is_old else replace(task, alike=stored)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _fetch(self, target: EpochTarget, wanted: Sequence[Wanted], directory: Path) -> Stored:
        """Have the rows that are wanted written to files. They are looked for by a join with the keys, which are few."""
        try:
            session = self._spark.newSession()
            ensure_catalog(session, self._catalog, self._warehouse)
            for name, value in _SETTINGS.items():
                session.conf.set(name, value)
            rows = session.table(target.name)
            if target.layout.mode is Mode.HISTORY and wanted[0].is_old:
                rows = rows.where(F.col(CURRENT))
            if all(each.keys is not None for each in wanted):
                keys = session.read.parquet(*(each.keys for each in wanted if each.keys is not None)).distinct()
                alike = [rows[quoted(name)].eqNullSafe(keys[f"k_{at}"]) for at, name in enumerate(wanted[0].columns)]
                rows = rows.join(F.broadcast(keys), reduce(lambda one, other: one & other, alike), "left_semi")
            names = target.layout.schema.names
            rows.select(*(F.col(quoted(name)).alias(f"v_{at}") for at, name in enumerate(names))).write.parquet(str(directory))
        except (PySparkException, Py4JJavaError) as error:
            raise error_of_ours(error, SinkError) from error
        return Stored(tuple(sorted(map(str, directory.glob("*.parquet")))))


def _parts(mode: Mode, counts: ChangeCounts, parallelism: int) -> int:
    """How many tasks share the keys of an epoch. What concerns several keys at once is for one."""
    if (counts.unchanged and counts.moves) or (counts.truncates and mode is not Mode.MIRROR):
        return 1
    return max(1, min(parallelism, counts.rows // _ROWS_A_TASK))


def _change(found: Sequence[EpochFiles], columns: Sequence[str]) -> TableChange:
    rows = [_new(each.rows) for each in found if each.rows is not None]
    deletes = [_new(each.deletes) for each in found if each.deletes is not None]
    return TableChange(rows, deletes, columns, any(each.emptied for each in found))


def _new(file: WrittenFile) -> NewFile:
    return NewFile(file.name, file.rows, file.bytes)


def discard(place: SnapshotPlace, change: TableChange) -> None:
    """Remove files that are not to be committed."""
    for file in (*change.files, *change.deletes):
        (Path(place.directory) / file.name).unlink(missing_ok=True)
