"""What executors do for a snapshot into Postgres: load chunks into the staging table, and put that in the table's place at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import TableRewrittenError
from penstock.position import Position
from penstock.postgres.applied import forget_chunks, load_chunks, load_record, lock_position, record_position, target_transaction
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.target_tables import ChunkPlace, add_constants, delete_keys, insert_rows, load_chunk, put_in_place, staging_table
from penstock.schema import TableName
from penstock.sinks.base import ChangedRows, SnapshotFile, SnapshotPlace
from penstock.sinks.collapse import match_column, value_column
from penstock.sinks.layout import Layout
from penstock.sinks.postgres_rows import added_columns, constant_texts


@dataclass(frozen=True, slots=True)
class ChunkLoader:
    """A `ChunkWriter` that writes to a server."""

    address: SourceAddress

    def __call__(
        self, batches: Iterator[pa.RecordBatch], place: SnapshotPlace, index: int, fence: Position
    ) -> tuple[SnapshotFile, Position]:
        names = tuple(place.schema.names[:-1])
        blocks = (batch.columns[: len(names)] for batch in batches)
        rows, read_at = load_chunk(self.address, ChunkPlace(place.prefix, names, index), fence, blocks)
        return SnapshotFile(chunk_name(index), rows, 0, "{}"), read_at


def chunk_name(index: int) -> str:
    return f"chunk-{index:06d}"


@dataclass(frozen=True, slots=True)
class FinishTask:
    """A staging table that holds `chunks`, to be put in the place of its table, at `fence`."""

    address: SourceAddress
    pipeline: str
    place: TableName
    layout: Layout
    chunks: Mapping[str, int]
    """By their names, the rows that each has."""
    fence: Position
    changed: ChangedRows | None


def finish(task: FinishTask) -> None:
    with target_transaction(task.address, f"finishing the snapshot of {task.place}") as connection:
        token = _checked(connection, task)
        staging = staging_table(token)
        if task.changed is not None:
            _repair(connection, staging, task.layout, task.changed)
        values = task.layout.snapshot_values(task.fence, datetime.now(UTC))
        add_constants(connection, staging, added_columns(task.layout), constant_texts(task.layout, values))
        put_in_place(connection, staging, task.place, task.layout.identity)
        forget_chunks(connection, token)
        record_position(connection, task.place, task.pipeline, task.fence)


def _checked(connection: Connection, task: FinishTask) -> str:
    """The name of the staging table, if all is there that is to be in it, and nothing else; and the table still waits for it."""
    position = lock_position(connection, task.place, task.pipeline)
    record, _ = load_record(connection, task.place)
    if record is None or record.pipeline != task.pipeline or record.staging is None or position is not None:
        raise TableRewrittenError(f"{task.place} has been filled or removed by somebody else meanwhile; the snapshot starts again")
    found = {chunk_name(number): rows for number, rows in load_chunks(connection, record.staging).items()}
    if found != dict(task.chunks):
        raise TableRewrittenError(f"the rows that were copied for {task.place} are not the ones that are there; the snapshot starts again")
    return record.staging


def _repair(connection: Connection, staging: TableName, layout: Layout, changed: ChangedRows) -> None:
    matches = [match_column(at) for at in range(len(layout.key))]
    files = sorted(map(str, Path(changed.keys).glob("*.parquet")))
    delete_keys(connection, staging, layout.key, _blocks(files, matches))
    names = layout.columns.names
    insert_rows(connection, staging, names, _blocks(list(changed.rows), [value_column(at) for at in range(len(names))]))


def _blocks(files: list[str], names: list[str]) -> Iterator[list[pa.Array]]:
    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=names):
                yield [batch.column(name) for name in names]
