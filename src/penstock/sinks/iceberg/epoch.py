"""The driver's part in an epoch of an Iceberg table: tasks for the executors, and the rows of the target that they turn out to need."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from penstock.change import ChangeCounts
from penstock.errors import SinkRefusedError
from penstock.sinks.base import ChangedRows, SnapshotPlace, TableChanges
from penstock.sinks.executors import Executors, are_light
from penstock.sinks.iceberg.catalog import LoadedTable, NewFile, TableChange, local_path
from penstock.sinks.iceberg.files import EpochFiles, EpochTask, RepairTask, WrittenFile, named_columns, write_epoch, write_repair
from penstock.sinks.iceberg.merging import MERGED, MergeTask, merge_files
from penstock.sinks.iceberg.reader import EpochTarget, LakeReader
from penstock.sinks.iceberg.schema import delete_columns
from penstock.sinks.layout import Mode
from penstock.sinks.slice_reader import Part
from penstock.sinks.source_truncates import source_column
from penstock.spool import storage
from penstock.spool.range import FileSlice

_ROWS_A_TASK = 500_000
_ADDED_ROWS_A_TASK = 100_000

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
        if _adds_only(target.layout.mode, changes.counts):
            tasks = [replace(task, slices=share, adds_only=True) for share in _shared(task.slices, changes.counts, self._executors)]
            return _change(self._executors.run(write_epoch, tasks, light=are_light(task.slices)), ())
        looks_up = target.layout.mode is not Mode.MIRROR or source_column(changes.views.values()) is not None
        parts = _parts(changes.counts, self._executors.parallelism, looks_up=looks_up)
        return self._settled(target, task, parts, self._write)

    def _write(self, tasks: Sequence[EpochTask]) -> list[EpochFiles]:
        # Rows of the target that it was found to need may be many.
        light = all(are_light(task.slices) and not task.old and task.alike is None for task in tasks)
        return self._executors.run(write_epoch, tasks, light=light)

    def repair(self, target: EpochTarget, changed: ChangedRows) -> TableChange:
        """The same for rows that are to be replaced, whatever else the mode has to tell them by."""
        task = EpochTask((), target.layout, target.place, "", target.layout.key)
        return self._settled(
            target, task, 1, lambda tasks: self._executors.run(write_repair, [RepairTask(changed, each) for each in tasks])
        )

    def rewrite(self, target: EpochTarget) -> list[NewFile]:
        """All rows that are there, as they are from then on."""
        storage.make_directory(self._scratch)
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

    def _settled(self, target: EpochTarget, task: EpochTask, parts: int, run: Run) -> TableChange:
        storage.make_directory(self._scratch)
        scratch = self._scratch / uuid4().hex
        try:
            task = replace(task, scratch=str(scratch))
            while True:
                tasks = [replace(task, part=Part(index, parts)) for index in range(parts)] if parts > 1 else [task]
                found = run(tasks)
                wanted = [each.wanted for each in found if each.wanted is not None]
                if not wanted:
                    return _change(found, delete_columns(target.place.schema, task.names))
                discard(target.place, _change(found, ()))
                # Rows that a delete takes without need may be meant by another part's: then one task does it all.
                parts = parts if all(each.is_old for each in wanted) else 1
                rows = [each for each in wanted if each.is_old == wanted[0].is_old]
                stored = self._reader.fetch(target, rows, scratch / uuid4().hex)
                task = replace(task, old=(*task.old, stored)) if rows[0].is_old else replace(task, alike=stored)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _adds_only(mode: Mode, counts: ChangeCounts) -> bool:
    """Inserts alone cannot meet a row that is there: the target equals the source just before them, and the key is unique there."""
    if mode is Mode.MIRROR:
        return not (counts.updates or counts.deletes or counts.moves or counts.truncates)
    return mode is Mode.APPEND


def _shared(slices: Sequence[FileSlice], counts: ChangeCounts, executors: Executors) -> list[tuple[FileSlice, ...]]:
    """Changes that need not meet: each task has some of the files."""
    wanted = max(min(-(-counts.rows // _ADDED_ROWS_A_TASK), executors.parallelism), -(-counts.rows // _ROWS_A_TASK), 1)
    count = min(wanted, len(slices))
    return [tuple(slices[at::count]) for at in range(count)]


def _parts(counts: ChangeCounts, parallelism: int, *, looks_up: bool) -> int:
    """How many tasks share the keys of an epoch. What concerns several keys at once is for one; so is a truncate that looks rows up."""
    if (counts.unchanged and counts.moves) or (counts.truncates and looks_up):
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
    for file in (*change.files, *change.deletes, *(change.rewritten or ())):
        (Path(place.directory) / file.name).unlink(missing_ok=True)
