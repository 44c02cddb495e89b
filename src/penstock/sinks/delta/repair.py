"""What changed while a table was being copied, brought to the copy: the rows under these keys go, those that were read again come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.change import EXACT
from penstock.sinks.base import ChangedRows, SnapshotPlace
from penstock.sinks.collapse import match_column, match_text_column
from penstock.sinks.delta.deletions import REPORTED_BYTES, report
from penstock.sinks.delta.rows import TableFiles, find_rows
from penstock.sinks.delta.step import DeltaStep
from penstock.sinks.delta.task import EpochPart
from penstock.sinks.executors import Executors
from penstock.sinks.layout import Layout
from penstock.sinks.row_files import removed_on_failure, write_batches
from penstock.sinks.values import build_exact


@dataclass(frozen=True, slots=True)
class RepairTask:
    """Travels to an executor."""

    layout: Layout
    changed: ChangedRows
    table: TableFiles
    place: SnapshotPlace


@dataclass(frozen=True)
class DeltaRepair(DeltaStep):
    changed: ChangedRows
    place: SnapshotPlace

    def apply(self, executors: Executors) -> bool:
        """Work it out and commit it; see `commit`."""
        self.check(deletes=True)
        task = RepairTask(self.layout, self.changed, self.table(scanned=True), self.place)
        return self.commit(executors.run(run_repair, [task]), executors, adds_only=False)


def run_repair(task: RepairTask) -> EpochPart:
    """What an executor does."""
    gone = find_rows(task.table, _keys(task), task.layout.key)
    file = write_batches(_rows(task), task.place, 0)
    with removed_on_failure(Path(task.place.directory) / file.name):
        return EpochPart(False, report(gone, task.place, 0, REPORTED_BYTES), file)


def _keys(task: RepairTask) -> pa.Table:
    files = sorted(Path(task.changed.keys).glob("*.parquet"))
    found = pa.concat_tables([pq.ParquetFile(file, coerce_int96_timestamp_unit="us").read() for file in files])
    columns = {name: found.column(match_column(at)).cast(task.layout.columns.field(name).type) for at, name in enumerate(task.layout.key)}
    texts = {name: found.column(match_text_column(at)) for at, name in enumerate(task.layout.key)}
    return pa.table({**columns, EXACT: build_exact(texts, found.num_rows)})


def _rows(task: RepairTask) -> Iterator[pa.RecordBatch]:
    for name in task.changed.rows:
        with pq.ParquetFile(name) as file:
            yield from file.iter_batches()
