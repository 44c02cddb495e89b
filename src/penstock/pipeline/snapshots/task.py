"""What an executor does for a snapshot: read one chunk from the source, write one file where the target wants it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from penstock.pipeline.letters.copy import Basket, chunk_basket
from penstock.pipeline.snapshots.state import ChunkRecord, record_chunk
from penstock.position import Position
from penstock.postgres.chunks import Aside, Chunk, read_chunk
from penstock.postgres.connection import Connection, SourceAddress
from penstock.sinks.base import ChunkWriter, SnapshotFile, SnapshotPlace
from penstock.sinks.row_files import write_batches
from penstock.spool import storage


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """One chunk and the place for its rows."""

    index: int
    chunk: Chunk
    place: SnapshotPlace


def chunk_writer(address: SourceAddress, snapshot: str, *, refuse_inexact: bool = False) -> Callable[[ChunkTask], SnapshotFile]:
    """The function that travels to the executors."""

    def write(task: ChunkTask) -> SnapshotFile:
        return write_chunk(address, snapshot, task, refuse_inexact=refuse_inexact)

    return write


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """A chunk whose end is recorded in the directory `records`, with the fence that it is read under."""

    task: ChunkTask
    records: str
    fence: Position


class RefusingWriter(ABC):
    """A `ChunkWriter` that refuses rows by itself. Travels to the executors."""

    @abstractmethod
    def putting_aside(self, aside: Aside) -> ChunkWriter:
        """The same, but for rows that are refused, which `aside` takes; all of a batch before the next is asked for."""


def recording_writer(
    address: SourceAddress,
    snapshot: str,
    writer: ChunkWriter | None = None,
    *,
    refuse_inexact: bool = False,
    puts_aside: bool = False,
    session: Connection | None = None,
) -> Callable[[RecordedTask], ChunkRecord]:
    """The same for chunks that are recorded. From then on nobody reads them again, whatever becomes of the driver.

    With `puts_aside`, rows that are refused are put beside the record of the chunk, instead of failing it. With a `session`, which locks
    the table, the function does not travel: the driver reads the rows in that session.
    """

    def write(recorded: RecordedTask) -> ChunkRecord:
        basket = _basket(recorded) if puts_aside else None
        rows = _read(address, snapshot, recorded, basket, refuse_inexact=refuse_inexact, session=session)
        chosen = writer or write_file
        if basket is not None and isinstance(chosen, RefusingWriter):
            chosen = chosen.putting_aside(basket)
        return record_rows(recorded, rows, chosen)

    return write


def source_rows(
    address: SourceAddress, snapshot: str, recorded: RecordedTask, *, refuse_inexact: bool, puts_aside: bool
) -> Iterator[pa.RecordBatch]:
    """The chunk as the source has it. With `puts_aside`, what is refused of it is durable when the last row has been given out."""
    return _read(address, snapshot, recorded, _basket(recorded) if puts_aside else None, refuse_inexact=refuse_inexact)


def _basket(recorded: RecordedTask) -> Basket:
    return Basket(chunk_basket(Path(recorded.records), recorded.task.index, recorded.fence))


def _read(
    address: SourceAddress,
    snapshot: str,
    recorded: RecordedTask,
    basket: Basket | None,
    *,
    refuse_inexact: bool,
    session: Connection | None = None,
) -> Iterator[pa.RecordBatch]:
    chunk = recorded.task.chunk
    rows: Iterator[pa.RecordBatch] = read_chunk(address, snapshot, chunk, refuse_inexact=refuse_inexact, aside=basket, session=session)
    return rows if basket is None else basket.watch(rows)


def record_rows(recorded: RecordedTask, rows: Iterator[pa.RecordBatch], writer: ChunkWriter) -> ChunkRecord:
    task = recorded.task
    file, fence = writer(rows, task.place, task.index, recorded.fence)
    record = ChunkRecord(task.index, fence, file, datetime.now(UTC))
    record_chunk(Path(recorded.records), record)
    return record


def write_file(batches: Iterator[pa.RecordBatch], place: SnapshotPlace, index: int, fence: Position) -> tuple[SnapshotFile, Position]:
    file = write_batches(batches, place, index)
    storage.sync_directory(Path(place.directory))
    return file, fence


def write_chunk(address: SourceAddress, snapshot: str, task: ChunkTask, *, refuse_inexact: bool = False) -> SnapshotFile:
    """Read, write, and say what was written. A chunk without rows leaves no file."""
    return write_batches(read_chunk(address, snapshot, task.chunk, refuse_inexact=refuse_inexact), task.place, task.index)
