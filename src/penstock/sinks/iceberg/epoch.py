"""The driver's part in an epoch of an Iceberg table: tasks for the executors, and the rows of the target that they turn out to need."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from penstock.errors import SinkRefusedError
from penstock.sinks.base import ChangedRows, SnapshotPlace, TableChanges
from penstock.sinks.executors import Executors, are_light
from penstock.sinks.iceberg.catalog import LoadedTable, NewFile, TableChange, local_path
from penstock.sinks.iceberg.files import EpochFiles, EpochTask, RepairTask, Wanted, WrittenFile, named_columns, write_epoch, write_repair
from penstock.sinks.iceberg.merging import MERGED, MergeTask, merge_files
from penstock.sinks.iceberg.reader import EpochTarget, LakeReader
from penstock.sinks.iceberg.schema import delete_columns
from penstock.sinks.layout import Mode
from penstock.sinks.shares import adds_only, plan_parts, share_files
from penstock.sinks.slice_reader import Part
from penstock.sinks.source_truncates import source_column

Run = Callable[[Sequence[EpochTask]], list[EpochFiles]]


class EpochWriter:
    """Has files written for one epoch. They are nobody's until they are committed."""

    def __init__(self, reader: LakeReader, executors: Executors, scratch: Path) -> None:
        self._reader = reader
        self._executors = executors
        self._scratch = scratch

    def write(self, target: EpochTarget, changes: TableChanges) -> TableChange:
        """The files for `changes`, and what they do to the table."""
        task = EpochTask(tuple(changes.slices), target.layout, target.place, "", named_columns(target.layout), views=changes.views)
        if adds_only(target.layout.mode, changes.counts):
            shares = share_files(task.slices, changes.counts, self._executors.parallelism)
            tasks = [replace(task, slices=share, adds_only=True) for share in shares]
            return _change(self._executors.run(write_epoch, tasks, light=are_light(task.slices)), ())
        looks_up = target.layout.mode is not Mode.MIRROR or source_column(changes.views.values()) is not None
        return self._settled(target, task, plan_parts(task.slices, changes.counts, looks_up=looks_up), self._write)

    def _write(self, tasks: Sequence[EpochTask]) -> list[EpochFiles]:
        # Rows of the target that it was found to need may be many.
        light = all(are_light(task.slices) and not task.old and task.alike is None for task in tasks)
        return self._executors.run(write_epoch, tasks, light=light)

    def repair(self, target: EpochTarget, changed: ChangedRows) -> TableChange:
        """The same for rows that are to be replaced, whatever else the mode has to tell them by."""
        task = EpochTask((), target.layout, target.place, "", target.layout.key)
        return self._settled(
            target, task, [None], lambda tasks: self._executors.run(write_repair, [RepairTask(changed, each) for each in tasks])
        )

    def rewrite(self, target: EpochTarget) -> list[NewFile]:
        """All rows that are there, as they are from then on."""
        return self._reader.rewrite(target, self._executors, self._scratch)

    def merge(self, loaded: LoadedTable, locations: Sequence[str]) -> NewFile | None:
        """One file with the rows of these; None if they do not have the columns that the table has now, or lie elsewhere."""
        place = SnapshotPlace(str(loaded.directory), loaded.schema, MERGED)
        try:
            files = tuple(str(local_path(each)) for each in locations)
        except SinkRefusedError:
            return None
        (made,) = self._executors.run(merge_files, [MergeTask(files, place)])
        return None if made is None else NewFile(made.name, made.rows, made.bytes)

    def _settled(self, target: EpochTarget, task: EpochTask, parts: list[Part | None], run: Run) -> TableChange:
        scratch = self._scratch / uuid4().hex
        try:
            task = replace(task, scratch=str(scratch))
            tasks = [replace(task, part=part) for part in parts]
            done: list[EpochFiles] = []
            while tasks:
                found = run(tasks)
                done += [each for each in found if each.wanted is None]
                lacking = [(each, files.wanted) for each, files in zip(tasks, found, strict=True) if files.wanted is not None]
                if len(parts) > 1 and not all(wanted.is_old for _, wanted in lacking):
                    # Rows that a delete takes without need may be meant by another part's: then one task does it all.
                    discard(target.place, _change(done, ()))
                    tasks, done, parts = [task], [], [None]
                else:
                    tasks = self._supplied(target, lacking, scratch)
            return _change(done, delete_columns(target.place.schema, task.names))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _supplied(self, target: EpochTarget, lacking: Sequence[tuple[EpochTask, Wanted]], scratch: Path) -> list[EpochTask]:
        """The tasks, each with the rows that it was found to lack: no task has to hold those of another."""
        if not lacking:
            return []

        def supply(task: EpochTask, wanted: Wanted) -> EpochTask:
            stored = self._reader.fetch(target, [wanted], scratch / uuid4().hex)
            return replace(task, old=(*task.old, stored)) if wanted.is_old else replace(task, alike=stored)

        with ThreadPoolExecutor(min(len(lacking), self._executors.parallelism), thread_name_prefix="penstock-fetch") as threads:
            return list(threads.map(supply, *zip(*lacking, strict=True)))


def _change(found: Sequence[EpochFiles], columns: Sequence[str]) -> TableChange:
    rows = [_new(each.rows) for each in found if each.rows is not None]
    deletes = [_new(each.deletes) for each in found if each.deletes is not None]
    return TableChange(rows, deletes, columns, any(each.emptied for each in found))


def _new(file: WrittenFile) -> NewFile:
    return NewFile(file.name, file.rows, file.bytes)


def discard(place: SnapshotPlace, change: TableChange) -> None:
    """Remove files that are not to be committed."""
    for file in (*change.files, *change.deletes, *(change.rewritten or ())):
        (Path(place.directory) / file.name).unlink(missing_ok=True)
