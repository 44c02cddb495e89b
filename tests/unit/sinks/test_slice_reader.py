"""Spooled changes, as tasks read them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.change import COMMIT_TIMESTAMP, COMMIT_VERSION, METADATA_FIELDS, ORDINAL, UNCHANGED, XID
from penstock.errors import SchemaChangedError, SinkError
from penstock.position import Position
from penstock.sinks import slice_reader
from penstock.sinks.modes import Layout, Mode
from penstock.sinks.row_chains import take
from penstock.sinks.slice_reader import Part, read_slices
from penstock.spool import SpoolReader, SpoolWriter
from penstock.spool.reader import FileSlice
from tests.support.property.source_model import changes_table
from tests.support.sinks.history import ODD, PLAIN, History
from tests.support.sinks.source import Source
from tests.support.spool.builders import ITEMS, Commit, at, committed, piece, time_of, transactions

COLUMNS = pa.schema([pa.field(column.name, column.arrow_type) for column in PLAIN.columns])
LAYOUT = Layout(COLUMNS, PLAIN.key, Mode.MIRROR)


@pytest.fixture(scope="module")
def history() -> History:
    history = History(PLAIN, 5, groups=20)
    history.run(20, truncates=0.1)
    return history


@pytest.fixture(scope="module")
def reader(history: History, tmp_path_factory: pytest.TempPathFactory) -> SpoolReader:
    """Some transactions are spooled in pieces."""
    root = tmp_path_factory.mktemp("spool")
    writer = SpoolWriter(root, Position.of(history.source.fence))
    for steps in history.steps():
        for step in steps:
            writer.append(step)
        writer.seal()
    return SpoolReader(root)


def slices_of(reader: SpoolReader, start: int, end: int) -> list[FileSlice]:
    return list(reader.read(Position.of(start), Position.of(end)).tables[PLAIN.name].slices)


def expected(source: Source, start: int, end: int) -> pa.Table:
    """Only the xid is not checked."""
    return changes_table(PLAIN, [each for each in source.log if start < each.position <= end]).drop_columns(
        [XID]
    )


def test_R16_slices_are_read_in_the_order_of_the_log_pieces_and_parts_of_files_too(
    history: History, reader: SpoolReader
) -> None:
    positions = [history.source.fence, *(each.position for each in history.source.log)]
    for start, end in [(0, 20), (0, 1), (3, 4), (2, 9), (7, 18), (19, 20)]:
        low, high = positions[start], positions[end]
        found = read_slices(slices_of(reader, low, high), LAYOUT)
        assert found.column_names == [*COLUMNS.names, *(field.name for field in METADATA_FIELDS)]
        assert found.drop_columns([XID]).equals(expected(history.source, low, high)), (start, end)


def test_changes_that_are_named_are_left_out_of_whole_files_and_of_pieces(
    history: History, reader: SpoolReader
) -> None:
    slices = slices_of(reader, history.source.fence, history.source.position)
    assert {slice.file.commit_version is None for slice in slices} == {True, False}
    whole = read_slices(slices, LAYOUT).to_pylist()
    names = frozenset((row[COMMIT_VERSION], row[ORDINAL]) for row in whole[::3])
    kept = read_slices([replace(slice, excluded=names) for slice in slices], LAYOUT).to_pylist()
    assert kept == [row for at, row in enumerate(whole) if at % 3]


def test_parts_hold_each_change_once_and_a_key_in_one_of_them(history: History, reader: SpoolReader) -> None:
    slices = slices_of(reader, history.source.fence, history.source.position)
    whole = read_slices(slices, LAYOUT).to_pylist()
    parts = [read_slices(slices, LAYOUT, Part(index, 3)).to_pylist() for index in range(3)]
    keys = [{row["id"] for row in part} - {None} for part in parts]
    assert all(keys)
    assert sum(map(len, keys)) == len(set().union(*keys))
    truncates = [row for row in whole if row["id"] is None]
    assert truncates
    for part in parts:
        assert [row for row in part if row["id"] is None] == truncates
        places = [(row[COMMIT_VERSION], row[ORDINAL]) for row in part]
        assert places == sorted(places)
    rows = [row for row in whole if row["id"] is not None]
    assert sum(len(part) for part in parts) == len(rows) + 3 * len(truncates)


def test_K15_parts_of_an_append_log_are_runs_of_it(history: History, reader: SpoolReader) -> None:
    slices = slices_of(reader, history.source.fence, history.source.position)
    layout = Layout(COLUMNS, PLAIN.key, Mode.APPEND)
    parts = [read_slices(slices, layout, Part(index, 3)) for index in range(3)]
    assert pa.concat_tables(parts).equals(read_slices(slices, layout))


def test_columns_are_found_by_name_cast_and_null_where_a_file_lacks_them(
    history: History, reader: SpoolReader
) -> None:
    columns = pa.schema([("added", pa.int32()), ("note", pa.large_string()), ("id", pa.decimal128(20, 0))])
    slices = slices_of(reader, history.source.fence, history.source.position)
    found = read_slices(slices, Layout(columns, ("id",), Mode.MIRROR))
    plain = read_slices(slices, LAYOUT)
    assert found.column("added").null_count == found.num_rows
    assert found.column("note").to_pylist() == plain.column("note").to_pylist()
    assert found.column("id").cast(pa.int64()).equals(plain.column("id"))
    assert found.column(UNCHANGED).equals(plain.column(UNCHANGED))


def test_values_that_the_target_cannot_hold_are_an_error_and_not_cut(
    history: History, reader: SpoolReader
) -> None:
    slices = slices_of(reader, history.source.fence, history.source.position)
    for column_type in (pa.decimal128(3, 0), pa.date32()):
        layout = Layout(pa.schema([("id", pa.int64()), ("amount", column_type)]), ("id",), Mode.MIRROR)
        with pytest.raises(SchemaChangedError, match=r"'amount' have type decimal128\(38, 18\)"):
            read_slices(slices, layout)


def test_X03_rows_written_before_their_commit_get_position_time_and_xid_from_the_manifest(
    tmp_path: Path,
) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(transactions(Commit(10, (ITEMS,))))
    writer.append(piece(4_000_000_000, (ITEMS, 0)))
    writer.append(piece(4_000_000_000, (ITEMS, 1), subxid=4_000_000_001))
    writer.append(committed(4_000_000_000, 20))
    slices = SpoolReader(tmp_path).read(at(0), at(20)).tables[ITEMS.name].slices
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in ITEMS.columns])
    rows = read_slices(slices, Layout(columns, ITEMS.key, Mode.APPEND)).to_pylist()
    assert [(row[COMMIT_VERSION], row[ORDINAL], row[XID], row[COMMIT_TIMESTAMP]) for row in rows] == [
        (10, 0, 7, time_of(10)),
        (20, 0, 4_000_000_000, time_of(20)),
        (20, 1, 4_000_000_000, time_of(20)),
    ]


def test_a_missing_file_is_named(history: History, reader: SpoolReader, tmp_path: Path) -> None:
    (slice, *_) = slices_of(reader, history.source.fence, history.source.position)
    with pytest.raises(SinkError, match=r"public\.plain cannot be read"):
        read_slices([replace(slice, path=tmp_path / "gone.parquet")], LAYOUT)


def test_nothing_is_a_table_without_rows() -> None:
    found = read_slices([], LAYOUT, Part(1, 2))
    assert found.num_rows == 0
    assert found.column_names[:5] == COLUMNS.names


def test_a_layout_and_a_part_travel_to_executors() -> None:
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in ODD.columns])
    for value in (Layout(columns, ODD.key, Mode.HISTORY), Part(1, 2)):
        assert pickle.loads(pickle.dumps(value)) == value


def test_a_part_of_an_epoch_holds_no_more_than_its_share_and_one_row_group(
    history: History, reader: SpoolReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slice, *_) = slices_of(reader, history.source.fence, history.source.position)
    rows = read_slices([slice], LAYOUT)
    wide = take(rows, np.zeros(4_000, np.int64))
    notes = pa.array([f"{number:08d}" * 512 for number in range(4_000)])
    wide = wide.set_column(0, "id", pa.array(range(4_000))).set_column(
        wide.column_names.index("note"), "note", notes
    )
    pq.write_table(
        wide, tmp_path / "wide.parquet", row_group_size=250, compression="none", use_dictionary=False
    )
    del rows, wide, notes
    held: list[int] = []
    before = pa.total_allocated_bytes()
    wanted = slice_reader._wanted

    def measured(*arguments: Any) -> pa.Table:
        held.append(pa.total_allocated_bytes() - before)
        return wanted(*arguments)

    monkeypatch.setattr(slice_reader, "_wanted", measured)
    part = read_slices(
        [replace(slice, path=tmp_path / "wide.parquet", after=None, upto=None)], LAYOUT, Part(1, 8)
    )
    assert 400 < part.num_rows < 600
    assert len(held) == 16
    assert max(held) < 6 << 20, "the file has 16 MB of notes"
