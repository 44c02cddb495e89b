"""Files of a Delta table that cost whoever reads it more than they are worth, written anew as one, beside the epochs.

Every epoch leaves a small file, and whoever looks for keys or reads the table opens them all; and rows that are gone are read all the same
until their file is written anew. A file that has lost more than half of its rows is paid for by what was deleted from it; small ones wait
until there are many. The rows are taken a row group at a time.

The commit says that no row changed and holds no position. Epochs go on while the files are written: rows that were deleted from them in the
meantime are found again by their place in the new file, which begins with a deletion vector then.
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

from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.delta.commit import EPOCH, added, commit, commit_info, removed, wide_stats
from penstock.sinks.delta.protocol import can_delete, check_writable
from penstock.sinks.delta.roaring import Positions
from penstock.sinks.delta.rows import ScanFile, TableFiles, read_groups
from penstock.sinks.delta.schema import file_schema, table_schema
from penstock.sinks.delta.state import DataFile, DeltaState, Unsupported, commit_file
from penstock.sinks.delta.vectors import DeletionVector, load_vector, vector_file, write_vectors
from penstock.sinks.executors import Executors
from penstock.sinks.row_files import write_batches
from penstock.spool import storage

_SMALL_BYTES = 4 << 20
_AT_ONCE_BYTES = 64 << 20
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class CompactTask:
    """Travels to an executor."""

    table: TableFiles
    place: SnapshotPlace


@dataclass(frozen=True, slots=True)
class Compacted:
    """What an executor wrote: one file, with so many rows of each of the others, in their order."""

    file: SnapshotFile
    counts: tuple[int, ...]


def costly_files(state: DeltaState, many: int) -> list[DataFile]:
    """Those that are to be made one now: some that have lost most of their rows, or small ones if there are `many`."""
    worn = [file for file in state.files.values() if file.bytes >= _SMALL_BYTES and _is_worn(file)]
    small = [file for file in state.files.values() if file.bytes < _SMALL_BYTES]
    chosen: list[DataFile] = []
    total = 0
    for file in worn or (small if len(small) >= many else []):
        total += file.bytes
        if chosen and total > _AT_ONCE_BYTES:
            break
        chosen.append(file)
    return chosen


def _is_worn(file: DataFile) -> bool:
    if file.vector is None or not file.stats:
        return False
    rows = json.loads(file.stats).get("numRecords")
    return type(rows) is int and 2 * file.vector.count > rows


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table that epochs go on changing. In its `turn`, in which none of them commits, `look` gives it as it is then."""

    path: Path
    turn: AbstractContextManager[object]
    look: Callable[[], DeltaState | None]


def compact(shared: SharedTable, state: DeltaState, files: Sequence[DataFile], executors: Executors) -> bool:
    """Make `files`, of the table as it was in `state`, one.

    False: it does not fit the table any more, or somebody else committed; then nothing is left behind.
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
        with shared.turn:
            now = shared.look()
            gone = None if now is None or not _is_alike(state, now) else _gone_since(path, state, now, files, found.counts)
            if now is None or gone is None or (gone.size and (gone.size == found.file.rows or not can_delete(now))):
                return False
            vector = write_vectors(path, [(found.file.name, gone)])[found.file.name] if gone.size else None
            may_be_there = True
            actions = _actions([now.files[file.path] for file in files if file.path in now.files], found.file, vector)
            may_be_there = commit(path, now.version + 1, actions)
            return may_be_there
    except Unsupported:
        may_be_there = False
        raise
    finally:
        if not may_be_there:
            (path / found.file.name).unlink(missing_ok=True)
            if vector is not None:
                vector_file(path, vector).unlink(missing_ok=True)


def run_compaction(task: CompactTask) -> Compacted:
    """What an executor does."""
    counts = [0] * len(task.table.files)

    def batches() -> Iterator[pa.RecordBatch]:
        for number, file in enumerate(task.table.files):
            for rows in read_groups(task.table, file):
                counts[number] += rows.num_rows
                yield from rows.to_batches()

    written = write_batches(batches(), task.place, 0)
    return Compacted(written, tuple(counts))


def _is_alike(before: DeltaState, now: DeltaState) -> bool:
    """Whether files that were right then are right now."""
    return before.metadata.action == now.metadata.action and before.protocol == now.protocol


def _gone_since(path: Path, before: DeltaState, now: DeltaState, files: Sequence[DataFile], counts: Sequence[int]) -> Positions | None:
    """Where in the new file the rows are that are gone by now; None if that cannot be told, or if rows are there again that were gone."""
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
    """Whether all commits are of epochs: what they take away as a whole has no rows left, and is nowhere else."""
    for version in range(after + 1, upto + 1):
        actions = [json.loads(line) for line in (storage.read_bytes(commit_file(path, version)) or b"").splitlines()]
        if not any(action.get("commitInfo", {}).get("operation") == EPOCH for action in actions):
            return False
    return True


def _identity(file: DataFile) -> str | None:
    return None if file.vector is None else file.vector.identity


def _positions(path: Path, file: DataFile) -> Positions:
    return _NONE if file.vector is None else load_vector(path, file.vector)


def _actions(files: Sequence[DataFile], written: SnapshotFile, vector: DeletionVector | None) -> list[dict[str, Any]]:
    actions: list[dict[str, Any]] = [removed(file) for file in files] + added([written])
    for action in actions:
        for part in action.values():
            part["dataChange"] = False
    if vector is not None:
        actions[-1]["add"] |= {"stats": wide_stats(written.stats, written.rows), "deletionVector": vector.document()}
    return [commit_info("PENSTOCK COMPACTION", {}, adds_only=False), *actions]
