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
from penstock.postgres.applied import (
    ensure_prepared,
    forget_chunks,
    load_chunks,
    load_record,
    lock_position,
    record_settled,
    target_transaction,
)
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.target_ddl import add_columns, put_in_place, staging_table
from penstock.postgres.target_tables import ChunkPlace, delete_keys, insert_rows, load_chunk
from penstock.schema import TableName
from penstock.sinks.base import ChangedRows, SnapshotFile, SnapshotPlace
from penstock.sinks.collapse import match_column, value_column
from penstock.sinks.layout import Layout
from penstock.sinks.postgres.rows import added_columns, constant_texts


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
    """The staging table `token`, which holds `chunks`, to be put in the place of its table, at `fence`."""

    address: SourceAddress
    pipeline: str
    place: TableName
    layout: Layout
    token: str
    chunks: Mapping[str, int]
    """By their names, the rows that each has."""
    fence: Position
    changed: ChangedRows | None


def finish(task: FinishTask) -> None:
    """Of several attempts, the answer to the first of which was lost perhaps, one does it."""
    with target_transaction(task.address, f"finishing the snapshot of {task.place}") as connection:
        ensure_prepared(connection)
        if _is_done(connection, task):
            return
        staging = staging_table(task.token)
        if task.changed is not None:
            _repair(connection, staging, task.layout, task.changed)
        values = task.layout.snapshot_values(task.fence, datetime.now(UTC))
        add_columns(connection, staging, added_columns(task.layout), constant_texts(task.layout, values))
        put_in_place(connection, staging, task.place, task.layout.identity)
        forget_chunks(connection, task.token)
        record_settled(connection, task.place, task.pipeline, task.fence)


def _is_done(connection: Connection, task: FinishTask) -> bool:
    """If not, the table still waits for what is staged, and all is there that is to be in it, and nothing else."""
    position = lock_position(connection, task.place, task.pipeline)
    record, _ = load_record(connection, task.place)
    is_this = record is not None and record.staging == task.token and record.pipeline == task.pipeline and not record.is_replaced
    if is_this and position == task.fence:
        return True
    if not is_this or position is not None:
        raise TableRewrittenError(f"{task.place} has been filled or removed by somebody else meanwhile; the snapshot starts again")
    found = {chunk_name(number): rows for number, rows in load_chunks(connection, task.token).items()}
    if found != dict(task.chunks):
        raise TableRewrittenError(f"the rows that were copied for {task.place} are not the ones that are there; the snapshot starts again")
    return False


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
