"""Turn the positions of deleted rows, which tasks find, into deletion vectors; and rewrite data files with
changed columns.

If a task finds few positions, it sends them to the driver, which writes the vectors. Many positions would
exceed `spark.driver.maxResultSize` and the driver's memory. The task then writes them to a file in the
table's directory and sends the name of the file, and executors write the vectors. The driver removes such a
file after the vectors are written.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock import storage
from penstock.arrow import distinct
from penstock.errors import SinkError
from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.delta.deletion_vectors import (
    DeletionVector,
    Positions,
    decode_positions,
    encode_positions,
    load_vector,
    write_vectors,
)
from penstock.sinks.delta.lookup import FoundRows, ScanFile, TableFiles, read_groups
from penstock.sinks.executors import Executors
from penstock.sinks.row_files import removed_on_failure, write_batches

REPORTED_BYTES = 4 << 20
"""Maximum size of the positions that all tasks of an epoch send to the driver, well below any
`spark.driver.maxResultSize`.
"""

_POSITION_BYTES = 8
_ROWS_A_TASK = 5_000_000
_ROW_GROUP = 32
_SCHEMA = pa.schema([("path", pa.string()), ("file_rows", pa.int64()), ("positions", pa.large_binary())])


@dataclass(frozen=True, slots=True)
class Deletions:
    """The deleted rows that one task found. Sent to the driver, and from there to the tasks that write
    vectors.
    """

    found: tuple[FoundRows, ...] = ()
    count: int = 0
    file: str | None = None
    """The name of the file in the table's directory that has the positions, if they are not in `found`."""


@dataclass(frozen=True, slots=True)
class MarkTask:
    """Write the deletion vectors of `files`, which are sorted by path. Sent to an executor."""

    root: str
    files: tuple[ScanFile, ...]
    deletions: tuple[Deletions, ...]
    attempt: str | None = None
    """Part of the names of the vector files."""


@dataclass(frozen=True, slots=True)
class MarkedFile:
    """A data file that loses rows, and its new deletion vector; None if the file loses all rows."""

    path: str
    file_rows: int
    vector: DeletionVector | None


def report(found: Sequence[FoundRows], place: SnapshotPlace, index: int, limit: int) -> Deletions:
    """Return a report of the deleted rows that task `index` found. Positions of more than `limit` bytes are
    written to a file.
    """
    count = sum(each.positions.size for each in found)
    if count * _POSITION_BYTES <= limit:
        return Deletions(tuple(found), count)
    name = f"{place.prefix}-{index:06d}-{secrets.token_hex(4)}-deletes.parquet"
    path = Path(place.directory) / name
    with removed_on_failure(path), pq.ParquetWriter(path, _SCHEMA) as writer:
        ordered = sorted(found, key=lambda each: each.path)
        for at in range(0, len(ordered), _ROW_GROUP):
            writer.write_table(_encoded(ordered[at : at + _ROW_GROUP]))
    return Deletions((), count, name)


def mark_files(
    root: Path, files: Iterable[ScanFile], deletions: Sequence[Deletions], executors: Executors, attempt: str
) -> list[MarkedFile]:
    """Write the vectors of all `files` that lose rows. Each task writes one file."""
    task = MarkTask(str(root), tuple(sorted(files, key=lambda file: file.path)), tuple(deletions), attempt)
    if all(each.file is None for each in deletions):
        return list(run_mark(task))  # a Spark job would take longer
    return [marked for found in executors.run(run_mark, _shares(task)) for marked in found]


def run_mark(task: MarkTask) -> tuple[MarkedFile, ...]:
    """Write the vectors of a task. Runs on an executor, or in the driver if the driver has all positions."""
    root, marked = Path(task.root), []
    before = {file.path: file.vector for file in task.files}

    def partly() -> Iterator[tuple[str, Positions]]:
        for path, (file_rows, positions) in _by_file(task):
            vector = before[path]
            gone = (
                positions
                if vector is None
                else distinct(np.concatenate([load_vector(root, vector), positions]))
            )
            marked.append(MarkedFile(path, file_rows, None))
            if gone.size < file_rows:
                yield path, gone

    try:
        vectors = write_vectors(root, partly(), task.attempt)
    except OSError as error:
        raise SinkError(f"cannot write to {root}: {error.strerror}") from error
    return tuple(MarkedFile(each.path, each.file_rows, vectors.get(each.path)) for each in marked)


def of_file(path: str, deletions: Sequence[Deletions]) -> tuple[Deletions, ...]:
    """The reports that concern one data file."""
    return _of_files({path}, deletions)


def positions_in(root: str, path: str, deletions: Sequence[Deletions]) -> Positions:
    """The positions of the deleted rows of one data file."""
    found = dict(_by_file(MarkTask(root, (ScanFile(path, (), None),), tuple(deletions))))
    return found[path][1] if path in found else np.empty(0, np.int64)


def remove_reports(root: Path, deletions: Iterable[Deletions]) -> None:
    for each in deletions:
        if each.file is not None:
            storage.delete(root / each.file)


def _shares(task: MarkTask) -> list[MarkTask]:
    """Divide a task into tasks for fewer data files, each with the reports that concern its files."""
    count = max(1, min(len(task.files), -(-sum(each.count for each in task.deletions) // _ROWS_A_TASK)))
    bounds = [len(task.files) * at // count for at in range(count + 1)]
    shares = []
    for low, high in pairwise(bounds):
        files = task.files[low:high]
        shares.append(
            replace(task, files=files, deletions=_of_files({file.path for file in files}, task.deletions))
        )
    return shares


def _of_files(paths: Collection[str], deletions: Sequence[Deletions]) -> tuple[Deletions, ...]:
    some = (
        replace(each, found=tuple(found for found in each.found if found.path in paths)) for each in deletions
    )
    return tuple(each for each in some if each.found or each.file is not None)


def _by_file(task: MarkTask) -> Iterator[tuple[str, tuple[int, Positions]]]:
    """Yield the path, the row count and the positions of deleted rows of each data file that loses rows.
    Decodes the positions of one file at a time.
    """
    parts: dict[str, list[FoundRows | tuple[int, bytes]]] = {file.path: [] for file in task.files}
    for each in task.deletions:
        for found in each.found:
            if found.path in parts:
                parts[found.path].append(found)
        if each.file is not None and task.files:
            low, high = task.files[0].path, task.files[-1].path
            rows = pq.read_table(
                Path(task.root) / each.file, filters=[("path", ">=", low), ("path", "<=", high)]
            )
            for path, file_rows, positions in zip(
                *(column.to_pylist() for column in rows.columns), strict=True
            ):
                parts[path].append((file_rows, positions))
    for path, some in parts.items():
        if some:
            pieces = [
                (one.file_rows, one.positions)
                if isinstance(one, FoundRows)
                else (one[0], decode_positions(one[1]))
                for one in some
            ]
            yield path, (pieces[0][0], distinct(np.concatenate([positions for _, positions in pieces])))


def _encoded(found: Sequence[FoundRows]) -> pa.Table:
    columns = [
        [each.path for each in found],
        [each.file_rows for each in found],
        [encode_positions(each.positions) for each in found],
    ]
    return pa.table(
        [pa.array(values, field.type) for values, field in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA
    )


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """Rewrite `file` with the columns of `table`, without deleted rows. Sent to an executor."""

    table: TableFiles
    file: ScanFile
    deletions: tuple[Deletions, ...]
    """Deleted rows in addition to those in the deletion vector."""
    place: SnapshotPlace
    index: int


def run_rewrite(task: RewriteTask) -> SnapshotFile:
    """Rewrite one data file. If no rows are left, no file is written."""
    return write_batches(_batches(task), task.place, task.index)


def _batches(task: RewriteTask) -> Iterator[pa.RecordBatch]:
    gone = positions_in(task.table.root, task.file.path, task.deletions)
    for rows in read_groups(task.table, task.file, gone):
        yield from rows.to_batches()
