"""Executor tasks of a snapshot. A task reads one chunk from the source, and writes one file for the
target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from penstock import storage
from penstock.pipeline.dead_letters.snapshot_rejections import RejectedRowsFile, chunk_rejected_file
from penstock.pipeline.snapshots.state import ChunkRecord, record_chunk
from penstock.position import Position
from penstock.postgres.chunks import Chunk, OnRejected, read_chunk
from penstock.postgres.connection import Connection, SourceAddress
from penstock.sinks.base import ChunkWriter, SnapshotFile, SnapshotPlace
from penstock.sinks.row_files import write_batches


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """A chunk to read, and the place for the file with its rows."""

    index: int
    chunk: Chunk
    place: SnapshotPlace


def chunk_writer(
    address: SourceAddress, snapshot: str, *, reject_inexact: bool = False
) -> Callable[[ChunkTask], SnapshotFile]:
    """Return the function that executors run for each chunk. It reads the chunk's rows, and writes them to a
    file.
    """

    def write(task: ChunkTask) -> SnapshotFile:
        return write_chunk(address, snapshot, task, reject_inexact=reject_inexact)

    return write


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """A chunk to read at `fence`. When the chunk is read, the task records this in the directory
    `records`.
    """

    task: ChunkTask
    records: str
    fence: Position


class RejectingWriter(ABC):
    """A `ChunkWriter` that may reject rows. Sent to executors."""

    @abstractmethod
    def with_rejected_to(self, on_rejected: OnRejected) -> ChunkWriter:
        """Return a copy of this writer that passes rejected rows to `on_rejected` instead of raising an
        error. It passes all rejected rows of a batch before it requests the next batch.
        """


def recording_writer(
    address: SourceAddress,
    snapshot: str,
    writer: ChunkWriter | None = None,
    *,
    reject_inexact: bool = False,
    diverts: bool = False,
    session: Connection | None = None,
) -> Callable[[RecordedTask], ChunkRecord]:
    """Return the function that reads a chunk, writes its rows and records it as read. A recorded chunk is
    never read again, even if the driver dies.

    With `diverts`, rejected rows are written to a file next to the chunk's record; otherwise they are an
    error. `session`: the session that holds the lock on the table. If it is given, the function reads in this
    session, so it must run in the driver.
    """

    def write(recorded: RecordedTask) -> ChunkRecord:
        rejected_file = _rejected_file(recorded) if diverts else None
        rows = _read(
            address, snapshot, recorded, rejected_file, reject_inexact=reject_inexact, session=session
        )
        chosen = writer or write_file
        if rejected_file is not None and isinstance(chosen, RejectingWriter):
            chosen = chosen.with_rejected_to(rejected_file)
        return record_rows(recorded, rows, chosen)

    return write


def source_rows(
    address: SourceAddress, snapshot: str, recorded: RecordedTask, *, reject_inexact: bool, diverts: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the chunk's source rows. With `diverts`, rejected rows are written to a file, which is durable
    when the iterator ends.
    """
    return _read(
        address,
        snapshot,
        recorded,
        _rejected_file(recorded) if diverts else None,
        reject_inexact=reject_inexact,
    )


def _rejected_file(recorded: RecordedTask) -> RejectedRowsFile:
    return RejectedRowsFile(chunk_rejected_file(Path(recorded.records), recorded.task.index, recorded.fence))


def _read(
    address: SourceAddress,
    snapshot: str,
    recorded: RecordedTask,
    rejected_file: RejectedRowsFile | None,
    *,
    reject_inexact: bool,
    session: Connection | None = None,
) -> Iterator[pa.RecordBatch]:
    chunk = recorded.task.chunk
    rows: Iterator[pa.RecordBatch] = read_chunk(
        address, snapshot, chunk, reject_inexact=reject_inexact, on_rejected=rejected_file, session=session
    )
    return rows if rejected_file is None else rejected_file.watch(rows)


def record_rows(recorded: RecordedTask, rows: Iterator[pa.RecordBatch], writer: ChunkWriter) -> ChunkRecord:
    task = recorded.task
    file, fence = writer(rows, task.place, task.index, recorded.fence)
    record = ChunkRecord(task.index, fence, file, datetime.now(UTC))
    record_chunk(Path(recorded.records), record)
    return record


def write_file(
    batches: Iterator[pa.RecordBatch], place: SnapshotPlace, index: int, fence: Position
) -> tuple[SnapshotFile, Position]:
    file = write_batches(batches, place, index)
    storage.sync_directory(Path(place.directory))
    return file, fence


def write_chunk(
    address: SourceAddress, snapshot: str, task: ChunkTask, *, reject_inexact: bool = False
) -> SnapshotFile:
    """Read the chunk and write its rows to a file. Returns the description of the file. For a chunk without
    rows, no file is created.
    """
    return write_batches(
        read_chunk(address, snapshot, task.chunk, reject_inexact=reject_inexact), task.place, task.index
    )
