from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.change import ChangeBatch, ChangeCounts, Idle, PiecesAborted, TransactionPiece, change_schema
from penstock.errors import SpoolError
from penstock.schema import Column
from penstock.spool import SchemaHistory, SpoolReader, SpoolWriter
from tests.support.spool.builders import (
    ITEMS,
    ORDERS,
    Commit,
    at,
    batch,
    changes,
    committed,
    piece,
    time_of,
    transactions,
)


def open_transactions(root: Path) -> list[str]:
    """Open transactions with files in the spool."""
    return sorted(path.name for path in (root / "open").iterdir())


def test_streamed_pieces_become_a_separate_segment_after_earlier_changes(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(transactions(Commit(10)))
    writer.append(piece(7, (ORDERS, 1), (ITEMS, 2)))
    assert open_transactions(tmp_path) == ["7"]
    before, pieces = writer.append(committed(7, 20))
    assert open_transactions(tmp_path) == []
    assert (before.start, before.end, pieces.start, pieces.end) == (at(0), at(10), at(10), at(20))
    assert [(each.commit_version, each.commit_timestamp) for each in pieces.files] == [
        (at(20), time_of(20))
    ] * 2
    assert changes(SpoolReader(tmp_path).read(at(0), at(20))) == {
        "orders": [("orders", 10, 0), ("orders", 20, 0), ("orders", 20, 1)],
        "items": [("items", 20, 2)],
    }
    assert open_transactions(tmp_path) == []


def test_pieces_are_not_in_a_range_that_ends_before_their_commit(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(committed(7, 20))
    reader = SpoolReader(tmp_path)
    assert changes(reader.read(at(0), at(19))) == {}
    assert changes(reader.read(at(19), at(20))) == {"orders": [("orders", 20, 0)]}
    assert not reader.read(at(19), at(20)).tables[ORDERS.name].slices[0].needs_filter


def test_interleaved_transactions_commit_apart(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    for ordinal in range(3):
        writer.append(piece(7, (ORDERS, ordinal)))
        writer.append(piece(8, (ORDERS, ordinal + 10)))
    writer.append(committed(8, 20))
    assert open_transactions(tmp_path) == ["7"]
    writer.append(committed(7, 30))
    assert changes(SpoolReader(tmp_path).read(at(0), at(30)))["orders"] == [
        *(("orders", 20, ordinal) for ordinal in (10, 11, 12)),
        *(("orders", 30, ordinal) for ordinal in (0, 1, 2)),
    ]


def test_small_pieces_share_row_groups(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    for ordinal in range(50):
        writer.append(piece(7, (ORDERS, ordinal)))
    writer.append(committed(7, 20))
    (path,) = tmp_path.glob("segments/*/*.parquet")
    assert pq.ParquetFile(path).num_row_groups == 1


def test_rows_reach_the_disk_when_more_wait_than_the_buffer_may_hold(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0), piece_buffer_bytes=0)
    for ordinal in range(4):
        writer.append(piece(7, (ORDERS, ordinal)))
    (path,) = tmp_path.glob("open/7/*.parquet")
    writer.append(committed(7, 20))
    assert not path.exists()
    (path,) = tmp_path.glob("segments/*/*.parquet")
    assert pq.ParquetFile(path).num_row_groups == 4


def test_more_tables_than_files_may_be_open_still_come_out_in_order(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0), piece_buffer_bytes=0, max_open_files=1)
    for ordinal in range(6):
        writer.append(piece(7, ((ORDERS, ITEMS)[ordinal % 2], ordinal)))
    (sealed,) = writer.append(committed(7, 20))
    assert len(sealed.files) == 6
    assert changes(SpoolReader(tmp_path).read(at(0), at(20))) == {
        "orders": [("orders", 20, ordinal) for ordinal in (0, 2, 4)],
        "items": [("items", 20, ordinal) for ordinal in (1, 3, 5)],
    }


@pytest.mark.parametrize("buffer_bytes", [0, 1 << 20])
def test_X03_a_rolled_back_transaction_leaves_nothing(tmp_path: Path, buffer_bytes: int) -> None:
    writer = SpoolWriter(tmp_path, at(0), piece_buffer_bytes=buffer_bytes)
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(piece(8, (ORDERS, 1)))
    writer.append(PiecesAborted(7, 7))
    assert open_transactions(tmp_path) == ["8"]
    writer.append(PiecesAborted(8, 8))
    assert open_transactions(tmp_path) == []
    assert open_transactions(tmp_path) == []
    with pytest.raises(SpoolError, match="none of its pieces"):
        writer.append(committed(8, 40))


@pytest.mark.parametrize("buffer_bytes", [0, 1 << 20])
def test_X03_rows_of_a_rolled_back_subtransaction_are_not_in_the_segment(
    tmp_path: Path, buffer_bytes: int
) -> None:
    writer = SpoolWriter(tmp_path, at(0), piece_buffer_bytes=buffer_bytes)
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(piece(7, (ORDERS, 1), (ITEMS, 2), subxid=9))
    writer.append(piece(7, (ORDERS, 3), subxid=8))
    writer.append(PiecesAborted(7, 9))
    writer.append(piece(7, (ORDERS, 4), (ITEMS, 5), subxid=10))
    writer.append(PiecesAborted(7, 10))
    (sealed,) = writer.append(committed(7, 20))
    assert changes(SpoolReader(tmp_path).read(at(0), at(20))) == {
        "orders": [("orders", 20, 0), ("orders", 20, 3)]
    }
    assert [(file.rows, file.counts, file.xid) for file in sealed.files] == [(2, ChangeCounts(inserts=2), 7)]
    assert open_transactions(tmp_path) == []


def test_X03_a_file_without_rolled_back_rows_is_not_written_again(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0), piece_buffer_bytes=0)
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(piece(7, (ITEMS, 1), subxid=9))
    before = {path.stat().st_ino for path in tmp_path.glob("open/7/000000.parquet")}
    writer.append(PiecesAborted(7, 9))
    writer.append(committed(7, 20))
    assert {path.stat().st_ino for path in tmp_path.glob("segments/*/*.parquet")} == before


def test_X03_the_rest_of_a_file_is_counted_again(tmp_path: Path) -> None:
    kinds = ["insert", "update_postimage", "delete", "insert", "truncate", "delete", "update_postimage"]
    owners = [7, 7, 9, 9, 7, 7, 9]
    unchanged = [None, ["tags"], None, None, None, None, ["tags"]]
    rows = batch(ORDERS, [(None, ordinal) for ordinal in range(len(kinds))]).rows
    exact = [[("id", "1")], None, [("id", "2")], None, None, [("total", "NaN")], None]
    for name, values in (
        ("_change_type", kinds),
        ("_xid", owners),
        ("_unchanged", unchanged),
        ("_exact", exact),
    ):
        rows = rows.set_column(
            rows.schema.get_field_index(name),
            rows.schema.field(name),
            pa.array(values, rows.schema.field(name).type),
        )
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(
        TransactionPiece(
            7,
            (
                ChangeBatch(
                    ORDERS, rows, ChangeCounts(2, 2, 2, 1, moves=1, unchanged=2, inexact=3, unreadable=1)
                ),
            ),
        )
    )
    writer.append(PiecesAborted(7, 9))
    (sealed,) = writer.append(committed(7, 20))
    assert sealed.files[0].counts == ChangeCounts(1, 1, 1, 1, moves=1, unchanged=1, inexact=2, unreadable=1)


def test_X03_a_table_column_with_one_of_our_names_does_not_decide_which_rows_stay(tmp_path: Path) -> None:
    odd = replace(ITEMS, columns=(Column("_xid", pa.int64(), 20), *ITEMS.columns))
    schema = change_schema(odd)
    writer = SpoolWriter(tmp_path, at(0))
    for ordinal, owner in enumerate((7, 9)):
        rows = batch(ITEMS, [(None, ordinal)], xid=owner).rows
        odd_rows = pa.RecordBatch.from_arrays([pa.array([9], pa.int64()), *rows.columns], schema=schema)
        writer.append(TransactionPiece(7, (ChangeBatch(odd, odd_rows, ChangeCounts(inserts=1)),)))
    writer.append(PiecesAborted(7, 9))
    writer.append(committed(7, 20))
    assert changes(SpoolReader(tmp_path).read(at(0), at(20))) == {"items": [("items", 20, 0)]}


def test_X02_a_million_rolled_back_savepoints_take_a_few_megabytes(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(piece(7, (ORDERS, 1), subxid=4_000_000_000))
    tracemalloc.start()
    for subxid in range(4_000_000_000, 4_000_000_000 + 200_000):
        writer.append(PiecesAborted(7, subxid))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 200_000 * 8
    writer.append(committed(7, 20))
    assert changes(SpoolReader(tmp_path).read(at(0), at(20))) == {"orders": [("orders", 20, 0)]}


def test_X02_single_rows_of_many_transactions_do_not_pile_up_in_memory(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0), piece_buffer_bytes=1 << 20)
    for ordinal in range(2_000):
        writer.append(piece(7 + ordinal % 3, (ORDERS, ordinal)))
    assert len(list(tmp_path.glob("open/*/*.parquet"))) == 3, (
        "a batch of one row takes kilobytes, and they count"
    )


def test_X01_a_transaction_of_which_nothing_is_left_is_ground_without_rows(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (ORDERS, 0), subxid=9))
    writer.append(PiecesAborted(7, 9))
    writer.append(piece(8))
    assert writer.append(committed(7, 20)) == ()
    assert writer.append(committed(8, 30)) == ()
    assert SpoolReader(tmp_path).segments() == ()
    sealed = writer.seal(quiet=True)
    assert sealed is not None
    assert (sealed.start, sealed.end, sealed.files, sealed.transactions) == (at(0), at(30), (), 2)
    assert open_transactions(tmp_path) == []


def test_H02_quiet_ground_is_sealed_while_transactions_are_open_and_they_commit_after_it(
    tmp_path: Path,
) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(Idle(at(30)))
    assert writer.seal(quiet=True) is not None
    assert open_transactions(tmp_path) == ["7"]
    writer.append(piece(7, (ORDERS, 1)))
    writer.append(committed(7, 40))
    assert [(each.start, each.end, each.rows) for each in SpoolReader(tmp_path).segments()] == [
        (at(0), at(30), 0),
        (at(30), at(40), 2),
    ]


def test_an_xid_seen_again_after_a_restart_starts_over(tmp_path: Path) -> None:
    SpoolWriter(tmp_path, at(0), piece_buffer_bytes=0).append(piece(7, (ORDERS, 0)))
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (ORDERS, 0), (ORDERS, 1)))
    writer.append(committed(7, 20))
    assert changes(SpoolReader(tmp_path).read(at(0), at(20))) == {
        "orders": [("orders", 20, 0), ("orders", 20, 1)]
    }


def test_R02_X03_a_key_described_at_the_commit_is_that_of_all_rows_which_have_its_columns(
    tmp_path: Path,
) -> None:
    bare = replace(ORDERS, key=())
    without = replace(bare, columns=bare.columns[1:])
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (without, 0), (bare, 1), (ITEMS, 2)))
    (manifest,) = writer.append(replace(committed(7, 20), keys={ORDERS.oid: ("total", "id")}))
    assert [(file.oid, file.schema.key) for file in manifest.files] == [
        (ORDERS.oid, ()),
        (ORDERS.oid, ("id", "total")),
        (ITEMS.oid, ("id",)),
    ]
    assert SchemaHistory.load(tmp_path).keys(at(20))[ORDERS.oid] == ("id", "total")
