"""What an executor does to make one file of many that hold rows of an Iceberg table as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.compression import as_written
from penstock.sinks.row_files import write_batches
from penstock.spool import storage

MERGED = "merged"
"""What the names of such files begin with."""
_BATCH_ROWS = 8192
"""Few: what is small as a file may be large as rows."""


@dataclass(frozen=True, slots=True)
class MergeTask:
    files: tuple[str, ...]
    place: SnapshotPlace


def merge_files(task: MergeTask) -> SnapshotFile | None:
    """The function that travels to the executors. None: a file has other columns than the table has by now, or none has rows."""
    wanted = as_written(task.place.schema).schema_arrow  # parts of a map are called otherwise there
    if not all(_is_of(pq.read_schema(file), wanted) for file in task.files):
        return None
    made = write_batches(_batches(task), task.place, 0)
    storage.sync_directory(Path(task.place.directory))
    return made if made.rows else None


def _batches(task: MergeTask) -> Iterator[pa.RecordBatch]:
    for each in task.files:
        with pq.ParquetFile(each) as file:
            yield from file.iter_batches(_BATCH_ROWS)


def _is_of(found: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether names, types and the numbers of the columns are the same, the inner ones too."""
    return len(found) == len(wanted) and all(map(_is_same, found, wanted))


def _is_same(found: pa.Field, wanted: pa.Field) -> bool:
    return bool(found.equals(wanted, check_metadata=True))
