"""Small files of a Delta table made one: every epoch leaves one, and whoever looks for keys or reads the table opens them all.

A commit of its own between two epochs, which says that no row changed and holds no position: the rows stay what they are. Files that are
large, and those that have lost most of their rows, are left to OPTIMIZE, which knows better when to take that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.delta_commit import added, commit, commit_info, removed
from penstock.sinks.delta_protocol import check_writable
from penstock.sinks.delta_rows import ScanFile, TableFiles, read_all
from penstock.sinks.delta_schema import file_schema, table_schema
from penstock.sinks.delta_state import DataFile, DeltaState
from penstock.sinks.executors import Executors
from penstock.sinks.row_files import write_batches

_MANY = 64
_SMALL_BYTES = 4 << 20
_AT_ONCE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CompactTask:
    """Travels to an executor."""

    table: TableFiles
    place: SnapshotPlace


def small_files(state: DeltaState) -> list[DataFile]:
    """Those that are to be made one; none while there are few."""
    small = [file for file in state.files.values() if file.bytes < _SMALL_BYTES]
    if len(small) < _MANY:
        return []
    chosen, total = [], 0
    for file in small:
        total += file.bytes
        if total > _AT_ONCE_BYTES:
            break
        chosen.append(file)
    return chosen


def compact(path: Path, state: DeltaState, files: Sequence[DataFile], executors: Executors) -> bool:
    """Make `files`, of the table as it is in `state`, one. False: somebody else committed meanwhile, and all is as it was."""
    check_writable(state)
    names = file_schema(state.metadata)
    scans = tuple(ScanFile(file.path, (), file.vector) for file in files)
    table = TableFiles(str(path), table_schema(state.metadata), names, (), scans)
    place = SnapshotPlace(str(path), names, f"compact-{state.version:020d}")
    (written,) = executors.run(run_compaction, [CompactTask(table, place)])
    actions: list[dict[str, Any]] = [removed(file) for file in files] + added([written])
    for action in actions:
        for part in action.values():
            part["dataChange"] = False
    info = commit_info("PENSTOCK COMPACTION", {}, adds_only=False)
    is_ours = commit(path, state.version + 1, [info, *actions])
    if not is_ours:
        (path / written.name).unlink(missing_ok=True)
    return is_ours


def run_compaction(task: CompactTask) -> SnapshotFile:
    """What an executor does."""
    return write_batches(iter(read_all(task.table).to_batches()), task.place, 0)
