"""Files of a Delta table written anew by executors, with the types that its columns have now, and what was given to those that are new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.delta.deletions import Deletions, positions_in
from penstock.sinks.delta.rows import ScanFile, TableFiles, read_groups
from penstock.sinks.row_files import write_batches


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """Travels to an executor."""

    table: TableFiles
    file: ScanFile
    deletions: tuple[Deletions, ...]
    """Rows that are deleted, besides those that a deletion vector has."""
    place: SnapshotPlace
    index: int


def run_rewrite(task: RewriteTask) -> SnapshotFile:
    """What an executor does. A file of which nothing is left is none."""
    return write_batches(_batches(task), task.place, task.index)


def _batches(task: RewriteTask) -> Iterator[pa.RecordBatch]:
    gone = positions_in(task.table.root, task.file.path, task.deletions)
    for rows in read_groups(task.table, task.file, gone):
        yield from rows.to_batches()
