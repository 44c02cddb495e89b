"""A Postgres target table and the changes applied to it, for each table mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from penstock.change import LogStep
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.target.rows import Wanted, find_rows
from penstock.postgres.target.state import target_connection
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.base import TableChanges
from penstock.sinks.modes import VALID_FROM, VALID_FROM_TIME, Layout, Mode
from penstock.sinks.postgres.rows import parse_rows, stored_names
from penstock.sinks.postgres.sink import PostgresSink
from penstock.sinks.postgres.targets import Naming
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.fix_postgres import Database
from tests.support.property.source_model import Record
from tests.support.sinks.source import Row, own_arrays
from tests.support.snapshot.local import LocalExecutors

TABLE = TableSchema(
    16401,
    TableName("odd. schema", 'it\'s "a" {table} %s'),
    (
        Column("note", pa.string(), 25),
        Column('k "1"', pa.string(), 25),
        Column("t", pa.string(), 25),
        Column("%(k)s", pa.string(), 25),
    ),
    ('k "1"', "%(k)s"),
)


class Copy:
    """One table in one mode."""

    def __init__(self, root: Path, database: Database, table: TableSchema, mode: Mode) -> None:
        self.address = SourceAddress.parse(database.dsn)
        self.sink = PostgresSink(
            LocalExecutors(), self.address, "shop", Naming(prefix="copy_"), mode_of=lambda _: mode
        )
        self.table = table
        self.layout = Layout(
            pa.schema([pa.field(column.name, pa.string()) for column in table.columns]), table.key, mode
        )
        self.writer = SpoolWriter(root / "spool", Position.of(100))
        self.reader = SpoolReader(root / "spool")

    def copy(self, rows: Sequence[Row], fence: int) -> None:
        place = self.sink.begin_snapshot(self.table, Position.of(fence))
        batch = pa.RecordBatch.from_arrays(
            [*own_arrays(self.table, rows), pa.nulls(len(rows), place.schema.types[-1])], schema=place.schema
        )
        file, _ = self.sink.chunk_writer(iter([batch]), place, 0, Position.of(fence))
        self.sink.finish_snapshot(self.table, [file], Position.of(fence))

    def spool(self, steps: Sequence[LogStep]) -> None:
        for step in steps:
            self.writer.append(step)
        self.writer.seal()

    def follow(self, end: int) -> None:
        target = self.sink.load_target(self.table.name)
        assert target is not None
        assert target.applied is not None
        found = self.reader.read(target.applied, Position.of(end)).tables.get(self.table.name)
        if found is not None:
            self.sink.apply(target, TableChanges(found.table, found.slices, found.counts), Position.of(end))

    def rows(self, fence: int) -> list[Record]:
        """The model does not know the time of the snapshot."""
        with target_connection(self.address, "reading") as connection:
            wanted = Wanted(stored_names(self.layout), (), {})
            found = parse_rows(
                find_rows(connection, self.sink.place(self.table.name), wanted, None), self.layout
            ).to_pylist()
        return [at_fence(row, fence) for row in found]


def at_fence(row: Record, fence: int) -> Record:
    return {**row, VALID_FROM_TIME: None} if row.get(VALID_FROM) == fence else row
