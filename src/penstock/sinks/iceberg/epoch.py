"""The driver's part of an epoch of an Iceberg table: plan tasks, look up the rows of the target that the
tasks need, collect the files that the tasks write.

A task that needs rows of the target returns a request and runs again with these rows. In Delta, a task reads
the files by itself (`delta/epoch.py`). In Iceberg, the scan for the requested keys has to be planned in the
driver, and Spark reads files that Penstock's own reader does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from penstock import storage
from penstock.errors import SinkRefusedError
from penstock.sinks.base import ChangedRows, SnapshotPlace, TableChanges
from penstock.sinks.executors import Executors, are_light
from penstock.sinks.fold import source_column
from penstock.sinks.iceberg.catalog import LoadedTable, NewFile, TableChange, local_path
from penstock.sinks.iceberg.files import (
    MERGED,
    EpochFiles,
    EpochTask,
    MergeTask,
    RepairTask,
    RowRequest,
    WrittenFile,
    merge_files,
    named_columns,
    write_epoch,
    write_repair,
)
from penstock.sinks.iceberg.reader import EpochTarget, TableReader
from penstock.sinks.iceberg.schema import delete_columns
from penstock.sinks.slice_reader import Part, plan_parts, share_files

Run = Callable[[Sequence[EpochTask]], list[EpochFiles]]


class EpochWriter:
    """Writes the files of one epoch. They are not part of the table until they are committed."""

    def __init__(self, reader: TableReader, executors: Executors, scratch: Path) -> None:
        self._reader = reader
        self._executors = executors
        self._scratch = scratch

    def write(self, target: EpochTarget, changes: TableChanges) -> TableChange:
        """Write the files for `changes`, and return what to commit."""
        task = EpochTask(
            tuple(changes.slices),
            target.layout,
            target.place,
            "",
            named_columns(target.layout),
            views=changes.views,
        )
        if target.layout.mode.adds_only(changes.counts):
            shares = share_files(task.slices, changes.counts, self._executors.parallelism)
            tasks = [replace(task, slices=share, adds_only=True) for share in shares]
            return _change(self._executors.run(write_epoch, tasks, light=are_light(task.slices)), ())
        looks_up = target.layout.mode.keeps_past_rows or source_column(changes.views.values()) is not None
        return self._run_tasks(
            target,
            task,
            plan_parts(task.slices, changes.counts, looks_up=looks_up, at_once=True),
            self._write,
        )

    def _write(self, tasks: Sequence[EpochTask]) -> list[EpochFiles]:
        # A task with looked-up rows is not light: their number has no limit.
        light = all(are_light(task.slices) and not task.old and task.alike is None for task in tasks)
        return self._executors.run(write_epoch, tasks, light=light)

    def repair(self, target: EpochTarget, changed: ChangedRows) -> TableChange:
        """Write the files for a snapshot repair, which replaces rows by key in every mode."""
        task = EpochTask((), target.layout, target.place, "", target.layout.key)
        return self._run_tasks(
            target,
            task,
            [None],
            lambda tasks: self._executors.run(write_repair, [RepairTask(changed, each) for each in tasks]),
        )

    def rewrite(self, target: EpochTarget) -> list[NewFile]:
        """Rewrite all existing rows with the new columns. Returns the new files."""
        storage.ensure_directory(self._scratch)
        return self._reader.rewrite(target, self._executors, self._scratch)

    def merge(self, loaded: LoadedTable, locations: Sequence[str]) -> NewFile | None:
        """Merge the files at `locations` into one. Returns None if their columns differ from the table's, if
        they have no rows, or if they are not on a local file system.
        """
        place = SnapshotPlace(str(loaded.directory), loaded.schema, MERGED)
        try:
            files = tuple(str(local_path(each)) for each in locations)
        except SinkRefusedError:
            return None
        (made,) = self._executors.run(merge_files, [MergeTask(files, place)])
        return None if made is None else NewFile(made.name, made.rows, made.bytes)

    def _run_tasks(
        self, target: EpochTarget, task: EpochTask, parts: list[Part | None], run: Run
    ) -> TableChange:
        storage.ensure_directory(self._scratch)
        scratch = self._scratch / uuid4().hex
        try:
            task = replace(task, scratch=str(scratch))
            tasks = [replace(task, part=part) for part in parts]
            done: list[EpochFiles] = []
            while tasks:
                found = run(tasks)
                done += [each for each in found if each.wanted is None]
                lacking = [
                    (each, files.wanted)
                    for each, files in zip(tasks, found, strict=True)
                    if files.wanted is not None
                ]
                if len(parts) > 1 and not all(wanted.is_old for _, wanted in lacking):
                    # An inexact delete of one part may match rows that another part deletes. So one task does
                    # the whole epoch.
                    discard(target.place, _change(done, ()))
                    tasks, done, parts = [task], [], [None]
                else:
                    tasks = self._look_up(target, lacking, scratch)
            return _change(done, delete_columns(target.place.schema, task.names))
        finally:
            storage.discard_tree(scratch)

    def _look_up(
        self, target: EpochTarget, lacking: Sequence[tuple[EpochTask, RowRequest]], scratch: Path
    ) -> list[EpochTask]:
        """Return the tasks to run again, each with the rows that it requested, and with no other rows."""
        if not lacking:
            return []

        def supply(task: EpochTask, wanted: RowRequest) -> EpochTask:
            stored = self._reader.fetch(target, [wanted], scratch / uuid4().hex)
            return replace(task, old=(*task.old, stored)) if wanted.is_old else replace(task, alike=stored)

        with ThreadPoolExecutor(
            min(len(lacking), self._executors.parallelism), thread_name_prefix="penstock-fetch"
        ) as threads:
            return list(threads.map(supply, *zip(*lacking, strict=True)))


def _change(found: Sequence[EpochFiles], columns: Sequence[str]) -> TableChange:
    rows = [_new(each.rows) for each in found if each.rows is not None]
    deletes = [_new(each.deletes) for each in found if each.deletes is not None]
    return TableChange(rows, deletes, columns, any(each.emptied for each in found))


def _new(file: WrittenFile) -> NewFile:
    return NewFile(file.name, file.rows, file.bytes)


def discard(place: SnapshotPlace, change: TableChange) -> None:
    """Remove files that will not be committed."""
    for file in (*change.files, *change.deletes, *(change.rewritten or ())):
        storage.delete(Path(place.directory) / file.name)
