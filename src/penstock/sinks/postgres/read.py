"""The rows of a Postgres target as a DataFrame: executors copy them to files, a range of blocks each, and Spark reads those."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import SnapshotLostError
from penstock.position import Position
from penstock.postgres.applied import target_connection
from penstock.postgres.connection import SourceAddress
from penstock.postgres.target_tables import count_blocks, read_blocks
from penstock.schema import TableName
from penstock.sinks.executors import Executors
from penstock.sinks.layout import Layout
from penstock.sinks.postgres.rows import parse_rows, stored_names
from penstock.spool import storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BLOCKS_A_PART = 16_384


@dataclass(frozen=True, slots=True)
class TableSource:
    """A table, to be read as it is when it is at `position`; None: whatever it is at."""

    address: SourceAddress
    pipeline: str
    place: TableName
    layout: Layout
    position: Position | None


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Blocks of the table from `first` up to `last` (None: to the end), and the file for their rows."""

    source: TableSource
    first: int
    last: int | None
    path: str


def read_table(spark: SparkSession, executors: Executors, source: TableSource, scratch: Path) -> DataFrame:
    """Leaves files in a directory of its own in `scratch`."""
    from pyspark.sql.pandas.types import from_arrow_schema

    directory = scratch / secrets.token_hex(8)
    storage.make_directory(directory)
    with target_connection(source.address, f"reading {source.place}") as connection:
        blocks = count_blocks(connection, source.place)
    starts = list(range(0, max(1, blocks), _BLOCKS_A_PART))
    ends = [*starts[1:], None]
    tasks = [ReadTask(source, *each, str(directory / f"{each[0]}.parquet")) for each in zip(starts, ends, strict=True)]
    executors.run(copy_blocks, tasks)
    struct = from_arrow_schema(source.layout.schema, prefer_timestamp_ntz=True)
    return spark.read.schema(struct).parquet(*(task.path for task in tasks))


def read_small(source: TableSource, limit_bytes: int) -> pa.Table | None:
    """The whole table, read by this process; None if it takes more memory than `limit_bytes`."""
    parts, size = [source.layout.schema.empty_table()], 0
    with target_connection(source.address, f"reading {source.place}") as connection:
        found, texts = read_blocks(connection, source.place, stored_names(source.layout), (0, None))
        _check_position(source, found)
        for block in texts:
            parts.append(parse_rows([block], source.layout))
            size += parts[-1].nbytes
            if size > limit_bytes:
                connection.close()  # it is in the middle of a COPY
                return None
    return pa.concat_tables(parts)


def copy_blocks(task: ReadTask) -> None:
    """As long as the table is at the same position in each of them, the tasks see the same table: nobody else writes it."""
    source = task.source
    with target_connection(source.address, f"reading {source.place}") as connection:
        found, texts = read_blocks(connection, source.place, stored_names(source.layout), (task.first, task.last))
        _check_position(source, found)
        with storage.create_file(Path(task.path)) as file, pq.ParquetWriter(file, source.layout.schema) as writer:
            for block in texts:
                writer.write_table(parse_rows([block], source.layout))


def _check_position(source: TableSource, found: Position | None) -> None:
    if source.position is not None and found != source.position:
        raise SnapshotLostError(f"{source.place} is at {found} by now, and was to be read at {source.position}")
