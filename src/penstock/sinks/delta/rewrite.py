"""Files of a Delta table written anew by executors, with the types that its columns have now, and what was given to those that are new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.delta.roaring import Positions
from penstock.sinks.delta.rows import ScanFile, TableFiles, read_groups
from penstock.sinks.row_files import write_batches


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """Travels to an executor."""

    table: TableFiles
    file: ScanFile
    gone: Positions | None
    """Rows that go, besides those that are gone already."""
    place: SnapshotPlace
    index: int


def run_rewrite(task: RewriteTask) -> SnapshotFile:
    """What an executor does. A file of which nothing is left is none."""
    return write_batches(_batches(task), task.place, task.index)


def _batches(task: RewriteTask) -> Iterator[pa.RecordBatch]:
    for rows in read_groups(task.table, task.file, task.gone):
        yield from rows.to_batches()
