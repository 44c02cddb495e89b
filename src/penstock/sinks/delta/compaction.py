"""Compact files of a Delta table into one file, while epochs continue.

Every epoch leaves a small file, which lookups and readers have to open. Readers also read deleted rows until
their file is rewritten. A file that lost more than half of its rows is rewritten at once; small files are
compacted when there are many. Rows are read one row group at a time.

The commit says that no row changed, and has no position. While the new file is written, epochs may delete
rows from the old files. These rows are located by their position in the new file, which then starts with a
deletion vector.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock import storage
from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.delta.commit import EPOCH, added, commit, commit_info, removed, wide_stats
from penstock.sinks.delta.deletion_vectors import (
    DeletionVector,
    Positions,
    load_vector,
    vector_file,
    write_vectors,
)
from penstock.sinks.delta.lookup import ScanFile, TableFiles, read_groups
from penstock.sinks.delta.state import (
    DataFile,
    DeltaState,
    Unsupported,
    can_delete,
    check_writable,
    commit_file,
    file_schema,
    table_schema,
)
from penstock.sinks.executors import Executors
from penstock.sinks.row_files import write_batches

_SMALL_BYTES = 4 << 20
_AT_ONCE_BYTES = 64 << 20
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class CompactTask:
    """Compact the files of `table` into one file at `place`. Sent to an executor."""

    table: TableFiles
    place: SnapshotPlace


@dataclass(frozen=True, slots=True)
class Compacted:
    """The file that an executor wrote, and how many of its rows come from each source file, in order."""

    file: SnapshotFile
    counts: tuple[int, ...]


def files_to_compact(state: DeltaState, many: int) -> list[DataFile]:
    """Files to compact now: those that lost most of their rows, and small ones if there are `many`."""
    sparse = [file for file in state.files.values() if file.bytes >= _SMALL_BYTES and _has_many_deleted(file)]
    small = [file for file in state.files.values() if file.bytes < _SMALL_BYTES]
    chosen: list[DataFile] = []
    total = 0
    for file in sparse or (small if len(small) >= many else []):
        total += file.bytes
        if chosen and total > _AT_ONCE_BYTES:
            break
        chosen.append(file)
    return chosen


def _has_many_deleted(file: DataFile) -> bool:
    if file.vector is None or not file.stats:
        return False
    rows = json.loads(file.stats).get("numRecords")
    return type(rows) is int and 2 * file.vector.count > rows


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table that epochs may change at any time. No epoch commits while `commit_lock` is held."""

    path: Path
    commit_lock: AbstractContextManager[object]
    load: Callable[[], DeltaState | None]


def compact(shared: SharedTable, state: DeltaState, files: Sequence[DataFile], executors: Executors) -> bool:
    """Compact `files` of the table, as it was in `state`, into one.

    Returns False if the table has changed in a conflicting way, or if another writer committed first. Then
    the new file is removed.
    """
    path = shared.path
    check_writable(state)
    names = file_schema(state.metadata)
    scans = tuple(ScanFile(file.path, (), file.vector) for file in files)
    table = TableFiles(str(path), table_schema(state.metadata), names, (), scans)
    place = SnapshotPlace(str(path), names, f"compact-{state.version:020d}")
    (found,) = executors.run(run_compaction, [CompactTask(table, place)])
    vector: DeletionVector | None = None
    may_be_there = False
    try:
        with shared.commit_lock:
            now = shared.load()
            gone = (
                None
                if now is None or not _is_still_valid(state, now)
                else _deleted_since(path, state, now, files, found.counts)
            )
            if (
                now is None
                or gone is None
                or (gone.size and (gone.size == found.file.rows or not can_delete(now)))
            ):
                return False
            vector = write_vectors(path, [(found.file.name, gone)])[found.file.name] if gone.size else None
            may_be_there = True
            actions = _actions(
                [now.files[file.path] for file in files if file.path in now.files], found.file, vector
            )
            may_be_there = commit(path, now.version + 1, actions)
            return may_be_there
    except Unsupported:
        may_be_there = False
        raise
    finally:
        if not may_be_there:
            storage.delete(path / found.file.name)
            if vector is not None:
                storage.delete(vector_file(path, vector))


def run_compaction(task: CompactTask) -> Compacted:
    """Read the files of a task and write them to one file."""
    counts = [0] * len(task.table.files)

    def batches() -> Iterator[pa.RecordBatch]:
        for number, file in enumerate(task.table.files):
            for rows in read_groups(task.table, file):
                counts[number] += rows.num_rows
                yield from rows.to_batches()

    written = write_batches(batches(), task.place, 0)
    return Compacted(written, tuple(counts))


def _is_still_valid(before: DeltaState, now: DeltaState) -> bool:
    """Whether a file written for the state `before` is valid in `now`: metadata and protocol are the same."""
    return before.metadata.action == now.metadata.action and before.protocol == now.protocol


def _deleted_since(
    path: Path, before: DeltaState, now: DeltaState, files: Sequence[DataFile], counts: Sequence[int]
) -> Positions | None:
    """The positions, in the new file, of rows that were deleted since `before`. None if they are unknown, or
    if deleted rows came back.
    """
    found, start = [_NONE], 0
    for file, count in zip(files, counts, strict=True):
        later = now.files.get(file.path)
        if later is None:
            if not _only_epochs(path, before.version, now.version):
                return None
            found.append(np.arange(start, start + count))
        elif _identity(later) != _identity(file):
            old, new = _positions(path, file), _positions(path, later)
            fresh = np.setdiff1d(new, old, assume_unique=True)
            if fresh.size + old.size != new.size:
                return None
            found.append(start + fresh - np.searchsorted(old, fresh))
        start += count
    return np.concatenate(found)


def _only_epochs(path: Path, after: int, upto: int) -> bool:
    """Whether all commits between two versions are epochs. A file that an epoch removes has no rows left.
    Other commits may remove a file and write its rows to another one.
    """
    for version in range(after + 1, upto + 1):
        actions = [
            json.loads(line) for line in (storage.read(commit_file(path, version)) or b"").splitlines()
        ]
        if not any(action.get("commitInfo", {}).get("operation") == EPOCH for action in actions):
            return False
    return True


def _identity(file: DataFile) -> str | None:
    return None if file.vector is None else file.vector.identity


def _positions(path: Path, file: DataFile) -> Positions:
    return _NONE if file.vector is None else load_vector(path, file.vector)


def _actions(
    files: Sequence[DataFile], written: SnapshotFile, vector: DeletionVector | None
) -> list[dict[str, Any]]:
    actions: list[dict[str, Any]] = [removed(file) for file in files] + added([written])
    for action in actions:
        for part in action.values():
            part["dataChange"] = False
    if vector is not None:
        actions[-1]["add"] |= {
            "stats": wide_stats(written.stats, written.rows),
            "deletionVector": vector.document(),
        }
    return [commit_info("PENSTOCK COMPACTION", {}, adds_only=False), *actions]
