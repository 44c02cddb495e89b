"""Random histories of tables in every mode, through a real spool into a real Postgres: after each epoch the table is what a model says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.change import EXACT, LogStep
from penstock.position import Position
from penstock.postgres.applied import target_connection
from penstock.postgres.connection import SourceAddress
from penstock.postgres.target_tables import Wanted, find_rows
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.base import TableChanges
from penstock.sinks.layout import VALID_FROM, VALID_FROM_TIME, Layout, Mode
from penstock.sinks.postgres.rows import parse_rows, stored_names
from penstock.sinks.postgres.sink import PostgresSink
from penstock.sinks.postgres.targets import Naming
from penstock.spool import SpoolReader, SpoolWriter
from tests.fix_postgres import Database
from tests.integration.sinks.history import KEYS, History
from tests.integration.sinks.source import Row, Value, own_arrays, whole
from tests.integration.snapshot.local import LocalExecutors
from tests.property.chronicle import Chronicle, Heap, Record, canonical

TABLE = TableSchema(
    16401,
    TableName("odd. schema", 'it\'s "a" {table} %s'),
    (Column("note", pa.string(), 25), Column('k "1"', pa.string(), 25), Column("t", pa.string(), 25), Column("%(k)s", pa.string(), 25)),
    ('k "1"', "%(k)s"),
)
KEYLESS = TableSchema(16402, TABLE.name, (Column("a", pa.string(), 114), Column("b", pa.string(), 1042, 9)), ())


class Copy:
    """One table in one mode."""

    def __init__(self, root: Path, database: Database, table: TableSchema, mode: Mode) -> None:
        self.address = SourceAddress.parse(database.dsn)
        self.sink = PostgresSink(LocalExecutors(), self.address, "shop", Naming(prefix="copy_"), mode_of=lambda _: mode)
        self.table = table
        self.layout = Layout(pa.schema([pa.field(column.name, pa.string()) for column in table.columns]), table.key, mode)
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
        """When a snapshot was finished is not for a model to know."""
        with target_connection(self.address, "reading") as connection:
            wanted = Wanted(stored_names(self.layout), (), {})
            found = parse_rows(find_rows(connection, self.sink.place(self.table.name), wanted, None), self.layout).to_pylist()
        return [at_fence(row, fence) for row in found]


def at_fence(row: Record, fence: int) -> Record:
    return {**row, VALID_FROM_TIME: None} if row.get(VALID_FROM) == fence else row


@pytest.fixture
def fresh_database(shared_database: Database) -> Database:
    shared_database.execute('DROP SCHEMA IF EXISTS penstock, "copy_odd. schema" CASCADE')
    return shared_database


@pytest.mark.parametrize("mode", [Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY])
@pytest.mark.parametrize("seed", range(3))
def test_after_every_epoch_the_table_is_what_the_model_says(
    fresh_database: Database, tmp_path: Path, mode: Mode, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sinks.shares.ROWS_A_TASK", (500_000, 40, 7)[seed])
    monkeypatch.setitem(KEYS, TABLE, lambda at: (Value(f"{at // 7}\t"), Value(f"k{at % 7}\\")))
    history = History(TABLE, seed, groups=2, source=Chronicle)
    history.statements = 25
    history.run(6, truncates=0.3 if seed % 2 else 0.0)
    source = history.source
    assert isinstance(source, Chronicle)
    copy = Copy(tmp_path, fresh_database, TABLE, mode)
    copy.copy(source.states[source.fence], source.fence)
    for steps in history.steps():
        copy.spool(steps)
        end = copy.reader.end
        assert end is not None
        copy.follow(end.value)
        expected = [at_fence(row, source.fence) for row in source.expected(mode, end.value)]
        assert canonical(copy.rows(source.fence), copy.layout) == canonical(expected, copy.layout)
    copy.sink.close()


def test_a_key_that_is_only_written_otherwise_goes_before_it_comes(
    fresh_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the server 1.0 and 1.00 are one key, to the fold they are two, which no part of an epoch may have without the other."""
    monkeypatch.setattr("penstock.sinks.shares.ROWS_A_TASK", 4)
    table = TableSchema(16403, TABLE.name, (Column("k", pa.string(), 1700), Column("note", pa.string(), 25)), ("k",))
    source = Chronicle(table, [{"k": Value(f"{number}.0"), "note": Value("old")} for number in range(20)])
    copy = Copy(tmp_path, fresh_database, table, Mode.MIRROR)
    copy.copy(source.states[source.fence], source.fence)
    source.insert({"k": Value("100"), "note": Value("first")})  # so that pairs of keys fall into parts in any order
    for number in range(20):
        source.update((Value(f"{number}.0"),), {"k": Value(f"{number}.00")})
    end = source.commit()
    copy.spool([whole(table, source.log)])
    copy.follow(end)
    assert canonical(copy.rows(source.fence), copy.layout) == canonical(source.expected(Mode.MIRROR, end), copy.layout)
    copy.sink.close()


def test_R05_of_equal_rows_without_key_as_many_go_as_the_source_deletes(fresh_database: Database, tmp_path: Path) -> None:
    """One column has no equality of its own, the other one that passes over blanks."""
    draw = random.Random(4)

    def row() -> Row:
        return {"a": Value(draw.choice([None, '{"x": 1}', "{}"])), "b": Value(draw.choice([None, "a    ", "     "]))}

    heap = Heap(KEYLESS, [row() for _ in range(12)])
    copy = Copy(tmp_path, fresh_database, KEYLESS, Mode.MIRROR)
    copy.copy(heap.rows, heap.fence)
    for _ in range(4):
        for _ in range(6):
            heap.insert(row()) if not heap.rows or draw.random() < 0.4 else heap.delete(draw.randrange(len(heap.rows)))
        heap.commit()
        copy.spool([whole(KEYLESS, heap.log[-1:])])
        copy.follow(heap.position)
        assert canonical(copy.rows(heap.fence), copy.layout) == canonical(heap.expected(heap.position), copy.layout)
    copy.sink.close()


def test_K15_a_log_has_the_snapshot_and_then_every_change_in_order(fresh_database: Database, tmp_path: Path) -> None:
    heap = Heap(KEYLESS, [{"a": Value("{}"), "b": Value("x    ")}])
    copy = Copy(tmp_path, fresh_database, KEYLESS, Mode.APPEND)
    copy.copy(heap.rows, heap.fence)
    heap.update(0, {"a": Value("1"), "b": Value(None)})
    heap.truncate()
    heap.commit()
    copy.spool([whole(KEYLESS, heap.log)])
    copy.follow(heap.position)
    found = sorted(copy.rows(heap.fence), key=lambda row: (row["_commit_version"], row["_ordinal"]))
    shown = [(row["_change_type"], row["a"], row["b"], row["_commit_version"], row[EXACT]) for row in found]
    assert shown == [
        ("snapshot", "{}", "x    ", 100, None),
        ("delete", "{}", "x    ", 110, None),
        ("insert", "1", None, 110, None),
        ("truncate", None, None, 110, None),
    ]
    copy.sink.close()
