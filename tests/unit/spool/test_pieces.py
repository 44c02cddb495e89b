from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.change import Quiet
from penstock.errors import SpoolError
from penstock.spool import SpoolReader, SpoolWriter
from tests.unit.spool.builders import ITEMS, ORDERS, Commit, at, changes, committed, piece, time_of, transactions


def test_pieces_become_a_segment_of_their_own_after_what_came_before(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(transactions(Commit(10)))
    writer.append(piece(7, (ORDERS, 1), (ITEMS, 2)))
    assert writer.is_open
    before, pieces = writer.append(committed(7, 20))
    assert not writer.is_open
    assert (before.start, before.end, pieces.start, pieces.end) == (at(0), at(10), at(10), at(20))
    assert [(each.commit_version, each.commit_timestamp) for each in pieces.files] == [(at(20), time_of(20))] * 2
    assert changes(SpoolReader(tmp_path).read(at(0), at(20))) == {
        "orders": [("orders", 10, 0), ("orders", 20, 0), ("orders", 20, 1)],
        "items": [("items", 20, 2)],
    }
    assert list((tmp_path / "open").iterdir()) == []


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
    assert writer.is_open
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
def test_pieces_of_a_rolled_back_transaction_leave_nothing(tmp_path: Path, buffer_bytes: int) -> None:
    writer = SpoolWriter(tmp_path, at(0), piece_buffer_bytes=buffer_bytes)
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(piece(8, (ORDERS, 1)))
    writer.discard(7)
    assert writer.is_open
    writer.append(Quiet(at(30)))
    assert not writer.is_open
    assert list((tmp_path / "open").iterdir()) == []
    with pytest.raises(SpoolError, match="none of its pieces"):
        writer.append(committed(8, 40))


def test_an_xid_seen_again_after_a_restart_starts_anew(tmp_path: Path) -> None:
    SpoolWriter(tmp_path, at(0), piece_buffer_bytes=0).append(piece(7, (ORDERS, 0)))
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (ORDERS, 0), (ORDERS, 1)))
    writer.append(committed(7, 20))
    assert changes(SpoolReader(tmp_path).read(at(0), at(20))) == {"orders": [("orders", 20, 0), ("orders", 20, 1)]}
