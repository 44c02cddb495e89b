"""Executor tasks for whole tables of a Postgres target: load the chunks of a snapshot into a staging table,
swap the staging table in, and read a table into files for Spark.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from penstock import storage
from penstock.errors import SnapshotLostError, TableRewrittenError
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.target.ddl import add_columns, replace_table, staging_table
from penstock.postgres.target.rows import (
    ChunkPlace,
    count_blocks,
    delete_keys,
    insert_rows,
    load_chunk,
    read_blocks,
)
from penstock.postgres.target.state import (
    ensure_prepared,
    forget_chunks,
    load_chunks,
    load_record,
    lock_position,
    record_settled,
    target_connection,
    target_transaction,
)
from penstock.schema import TableName
from penstock.sinks.base import ChangedRows, SnapshotFile, SnapshotPlace
from penstock.sinks.executors import Executors
from penstock.sinks.modes import Layout
from penstock.sinks.postgres.rows import added_columns, constant_texts, parse_rows, stored_names
from penstock.sinks.repair_files import match_column, value_column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class ChunkLoader:
    """A `ChunkWriter` that copies chunks into a staging table of the target."""

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
    """Replace the table at `place` by the staging table `token`, which must contain exactly `chunks`, and
    record `fence` as its position.
    """

    address: SourceAddress
    pipeline: str
    place: TableName
    layout: Layout
    token: str
    chunks: Mapping[str, int]
    """The row count of each chunk, by name."""
    fence: Position
    changed: ChangedRows | None


def finish(task: FinishTask) -> None:
    """Swap the staging table in. If several attempts run, only one of them swaps it in."""
    with target_transaction(task.address, f"finishing the snapshot of {task.place}") as connection:
        ensure_prepared(connection)
        if _is_done(connection, task):
            return
        staging = staging_table(task.token)
        if task.changed is not None:
            _repair(connection, staging, task.layout, task.changed)
        values = task.layout.mode.snapshot_values(task.fence, datetime.now(UTC))
        add_columns(connection, staging, added_columns(task.layout), constant_texts(task.layout, values))
        replace_table(connection, staging, task.place, task.layout.identity)
        forget_chunks(connection, task.token)
        record_settled(connection, task.place, task.pipeline, task.fence)


def _is_done(connection: Connection, task: FinishTask) -> bool:
    """Whether another attempt has swapped the staging table in. If not, check that the target still expects
    this staging table, and that the staging table has exactly these chunks.
    """
    position = lock_position(connection, task.place, task.pipeline)
    record, _ = load_record(connection, task.place)
    is_this = (
        record is not None
        and record.staging == task.token
        and record.pipeline == task.pipeline
        and not record.is_replaced
    )
    if is_this and position == task.fence:
        return True
    if not is_this or position is not None:
        raise TableRewrittenError(
            f"{task.place} was filled or removed by another writer; the snapshot starts again"
        )
    found = {chunk_name(number): rows for number, rows in load_chunks(connection, task.token).items()}
    if found != dict(task.chunks):
        raise TableRewrittenError(
            f"the staged rows of {task.place} are not the ones that were copied; the snapshot starts again"
        )
    return False


def _repair(connection: Connection, staging: TableName, layout: Layout, changed: ChangedRows) -> None:
    matches = [match_column(at) for at in range(len(layout.key))]
    files = sorted(map(str, storage.list_paths(Path(changed.keys), "*.parquet")))
    delete_keys(connection, staging, layout.key, _blocks(files, matches))
    names = layout.columns.names
    insert_rows(
        connection,
        staging,
        names,
        _blocks(list(changed.rows), [value_column(at) for at in range(len(names))]),
    )


def _blocks(files: list[str], names: list[str]) -> Iterator[list[pa.Array]]:
    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=names):
                yield [batch.column(name) for name in names]


_BLOCKS_A_PART = 16_384


@dataclass(frozen=True, slots=True)
class TableSource:
    """A table to read at `position`; if that is None, at its current position."""

    address: SourceAddress
    pipeline: str
    place: TableName
    layout: Layout
    position: Position | None


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Read the table's blocks from `first` up to, not including, `last` (None: up to the end) into a file."""

    source: TableSource
    first: int
    last: int | None
    path: str


def read_table(spark: SparkSession, executors: Executors, source: TableSource, scratch: Path) -> DataFrame:
    """Read the table into files in a new directory in `scratch`, and return a DataFrame of these files."""
    from pyspark.sql.pandas.types import from_arrow_schema

    directory = scratch / secrets.token_hex(8)
    storage.ensure_directory(directory)
    with target_connection(source.address, f"reading {source.place}") as connection:
        blocks = count_blocks(connection, source.place)
    starts = list(range(0, max(1, blocks), _BLOCKS_A_PART))
    ends = [*starts[1:], None]
    tasks = [
        ReadTask(source, *each, str(directory / f"{each[0]}.parquet"))
        for each in zip(starts, ends, strict=True)
    ]
    executors.run(copy_blocks, tasks)
    struct = from_arrow_schema(source.layout.schema, prefer_timestamp_ntz=True)
    return spark.read.schema(struct).parquet(*(task.path for task in tasks))


def read_small(source: TableSource, limit_bytes: int) -> pa.Table | None:
    """Read the whole table in this process. Returns None if it exceeds `limit_bytes` of memory."""
    parts, size = [source.layout.schema.empty_table()], 0
    with target_connection(source.address, f"reading {source.place}") as connection:
        found, texts = read_blocks(connection, source.place, stored_names(source.layout), (0, None))
        _check_position(source, found)
        for block in texts:
            parts.append(parse_rows([block], source.layout))
            size += parts[-1].nbytes
            if size > limit_bytes:
                connection.close()  # a COPY is in progress
                return None
    return pa.concat_tables(parts)


def copy_blocks(task: ReadTask) -> None:
    """Read blocks into a file. Only this pipeline writes to the table, so tasks that see the same position
    see the same rows.
    """
    source = task.source
    with target_connection(source.address, f"reading {source.place}") as connection:
        found, texts = read_blocks(
            connection, source.place, stored_names(source.layout), (task.first, task.last)
        )
        _check_position(source, found)
        with (
            storage.open_new(Path(task.path)) as file,
            pq.ParquetWriter(file, source.layout.schema) as writer,
        ):
            for block in texts:
                writer.write_table(parse_rows([block], source.layout))


def _check_position(source: TableSource, found: Position | None) -> None:
    if source.position is not None and found != source.position:
        raise SnapshotLostError(f"{source.place} is at {found}, but should be read at {source.position}")
