"""Rows of spool files: with their commit, filtered, in bounded numbers, and as events in log order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.capture.events import spooled_events
from penstock.change import change_schema
from penstock.contracts.capture import Upsert
from penstock.errors import SchemaChangedError, SpoolCorruptError
from penstock.schema import Column
from penstock.spark.envelope import read_changes
from penstock.spool import SpoolReader, SpoolWriter
from penstock.spool.reader import SpoolRange
from penstock.spool.rows import read_rows
from tests.support.spool.builders import (
    ITEMS,
    ORDERS,
    Commit,
    at,
    batch,
    committed,
    piece,
    time_of,
    transactions,
)

LOG = (Commit(10, (ORDERS, ITEMS, ORDERS)), Commit(20, (ITEMS, ORDERS)), Commit(30, (ORDERS,)))


@pytest.fixture
def spool(tmp_path: Path) -> SpoolReader:
    """Three transactions in one segment, then one in pieces."""
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(transactions(*LOG))
    writer.append(piece(7, (ORDERS, 0), (ITEMS, 1)))
    writer.append(piece(7, (ORDERS, 2), (ITEMS, 3)))
    writer.append(committed(7, 40))
    writer.close()
    return SpoolReader(tmp_path)


def read(found: SpoolRange, max_rows: int = 100) -> list[tuple[int, object, int]]:
    batches = [
        rows for part in found.tables[ORDERS.name].slices for rows in read_rows(part, max_rows, 1 << 20)
    ]
    assert all(rows.num_rows <= max_rows for rows in batches)
    columns = ("_commit_version", "_commit_timestamp", "_ordinal")
    return [
        row
        for rows in batches
        for row in zip(*(rows.column(name).to_pylist() for name in columns), strict=True)
    ]


def test_every_row_knows_its_commit(spool: SpoolReader) -> None:
    places = [(10, 0), (10, 2), (20, 1), (30, 0), (40, 0), (40, 2)]
    expected = [(version, time_of(version), ordinal) for version, ordinal in places]
    assert read(spool.read(at(0), at(40))) == expected
    assert read(spool.read(at(0), at(40)), max_rows=1) == expected
    assert read(spool.read(at(10), at(30))) == expected[2:4]


def test_long_rows_come_in_small_batches(spool: SpoolReader) -> None:
    (part, *_) = spool.read(at(0), at(30)).tables[ORDERS.name].slices
    assert len(list(read_rows(part, 100, part.file.bytes))) == 1
    assert len(list(read_rows(part, 100, 1))) == part.file.rows


def test_column_of_the_table_is_not_taken_for_metadata(tmp_path: Path) -> None:
    odd = replace(ITEMS, columns=(Column("_commit_version", pa.int64(), 20), *ITEMS.columns), key=("id",))
    plain = batch(odd, [(None, 0)])
    values = pa.RecordBatch.from_arrays(
        [pa.array([99], pa.int64()), *plain.rows.columns[1:]], schema=change_schema(odd)
    )
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(replace(piece(7), batches=(replace(plain, rows=values),)))
    writer.append(committed(7, 40))
    writer.close()
    (placed,) = spooled_events(SpoolReader(tmp_path).read(at(0), at(40)))
    assert isinstance(placed.event, Upsert)
    assert (placed.version, placed.event.row["_commit_version"]) == (40, 99)


def test_events_of_several_tables_are_in_the_order_of_the_log(spool: SpoolReader) -> None:
    placed = list(spooled_events(spool.read(at(0), at(40))))
    expected = [
        (commit.position, ordinal, table.name)
        for commit in LOG
        for ordinal, table in enumerate(commit.tables)
    ]
    expected += [(40, ordinal, (ORDERS, ITEMS)[ordinal % 2].name) for ordinal in range(4)]
    assert [(each.version, each.ordinal, each.event.table) for each in placed] == expected
    assert list(spooled_events(spool.read(at(0), at(5)))) == []


def test_changes_for_spark_have_the_one_schema_or_are_refused(spool: SpoolReader) -> None:
    slices = spool.read(at(0), at(40)).tables[ORDERS.name].slices
    schema = change_schema(ORDERS)
    assert pa.Table.from_batches(read_changes(slices, schema)).num_rows == 6
    with pytest.raises(SchemaChangedError):
        list(read_changes(slices, change_schema(ITEMS)))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"PAR1 and nothing else")])
def test_file_that_is_gone_or_damaged_is_named(spool: SpoolReader, damage: Callable[[Path], object]) -> None:
    (part, *_) = spool.read(at(0), at(30)).tables[ORDERS.name].slices
    damage(part.path)
    with pytest.raises(SpoolCorruptError, match=part.path.name):
        list(read_rows(part, 100, 1 << 20))
