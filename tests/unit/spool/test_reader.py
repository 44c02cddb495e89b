from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import storage
from penstock.change import ChangeCounts, Idle, Transactions
from penstock.errors import SpoolFormatError, SpoolGapError
from penstock.schema import Column
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.spool.builders import (
    ITEMS,
    ORDERS,
    Commit,
    at,
    batch,
    capture,
    changes,
    old_batch,
    time_of,
    transactions,
)

THREE = [[Commit(10)], [Commit(20, (ORDERS, ITEMS)), Commit(30)], [Commit(40)]]


def test_a_missing_spool_is_empty(tmp_path: Path) -> None:
    reader = SpoolReader(tmp_path / "none")
    assert (reader.segments(), reader.start, reader.end) == ((), None, None)
    assert reader.limit(at(5)) == at(5)
    assert reader.read(at(5), at(5)).tables == {}
    with pytest.raises(SpoolGapError, match="which is empty"):
        reader.read(at(0), at(5))


def test_a_range_gives_files_without_filter_where_it_ends_with_segments(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    found = SpoolReader(tmp_path).read(at(10), at(40))
    assert changes(found) == {
        "orders": [("orders", 20, 0), ("orders", 30, 0), ("orders", 40, 0)],
        "items": [("items", 20, 1)],
    }
    assert not any(part.needs_filter for table in found.tables.values() for part in table.slices)
    assert all(part.path.is_absolute() for table in found.tables.values() for part in table.slices)
    assert found.tables[ORDERS.name].counts == ChangeCounts(inserts=3)
    assert found.counts == ChangeCounts(inserts=4)
    assert found.commit_time == time_of(40)


def test_a_boundary_inside_a_segment_filters_only_the_files_that_reach_over_it(tmp_path: Path) -> None:
    capture(tmp_path, 0, [[Commit(10), Commit(20, (ORDERS, ITEMS)), Commit(30)]])
    found = SpoolReader(tmp_path).read(at(10), at(20))
    (orders,), (items,) = found.tables[ORDERS.name].slices, found.tables[ITEMS.name].slices
    assert (orders.after, orders.upto) == (at(10), at(20))
    assert not items.needs_filter
    assert changes(found) == {"orders": [("orders", 20, 0)], "items": [("items", 20, 1)]}
    assert list(SpoolReader(tmp_path).read(at(20), at(30)).tables) == [ORDERS.name]


def test_old_rows_are_read_on_request_only_and_follow_the_changes_of_their_schema(tmp_path: Path) -> None:
    widened = replace(ORDERS, columns=(*ORDERS.columns, Column("more", pa.int64(), 20)))
    writer = SpoolWriter(tmp_path, at(0))
    for position, table in ((10, ORDERS), (20, widened), (30, ORDERS)):
        changed, old = batch(table, [(position, 1)]), old_batch(table, [(position, 0)])
        writer.append(Transactions((changed, old), at(position), time_of(position), 1))
    writer.seal()
    found = SpoolReader(tmp_path).read(at(0), at(30)).tables[ORDERS.name]
    assert [each.file.schema for each in found.slices] == [ORDERS, widened, ORDERS]
    assert found.counts == ChangeCounts(inserts=3)
    assert [(each.file.schema, each.file.is_old) for each in found.with_old] == [
        (ORDERS, False),
        (ORDERS, True),
        (ORDERS, True),
        (widened, False),
        (widened, True),
        (ORDERS, False),
    ]
    assert sum(each.file.counts.preimages for each in found.old) == 3


@pytest.mark.parametrize(("start", "end"), [(5, 20), (10, 50), (0, 60), (20, 30)])
def test_a_hole_is_named_with_the_extent_of_the_spool(tmp_path: Path, start: int, end: int) -> None:
    capture(tmp_path, 10, [[Commit(20)]])
    capture(tmp_path, 30, [[Commit(40)]])
    reader = SpoolReader(tmp_path)
    with pytest.raises(SpoolGapError, match="reaches from 0/A to 0/28") as caught:
        reader.read(at(start), at(end))
    assert caught.value.hint


def test_error_of_a_hole_in_the_middle_says_where_the_spool_continues(tmp_path: Path) -> None:
    capture(tmp_path, 10, [[Commit(20)]])
    capture(tmp_path, 30, [[Commit(40)]])
    with pytest.raises(SpoolGapError, match=r"right after 0/14 .* hole up to 0/1E"):
        SpoolReader(tmp_path).read(at(10), at(40))


def test_the_limit_never_plans_over_a_hole(tmp_path: Path) -> None:
    capture(tmp_path, 10, [[Commit(20)]])
    capture(tmp_path, 30, [[Commit(40)]])
    reader = SpoolReader(tmp_path)
    assert reader.limit(at(10)) == at(20)
    for start in (5, 20, 25):
        with pytest.raises(SpoolGapError):
            reader.limit(at(start))


@pytest.mark.parametrize(
    ("start", "max_rows", "expected"),
    [
        (0, 1, 10),
        (0, 3, 10),
        (0, 4, 30),
        (0, None, 50),
        (10, 1, 30),
        (10, 4, 50),
        (15, 1, 30),
        (40, 0, 50),
        (50, 9, 50),
        (99, 9, 99),
    ],
)
def test_the_limit_takes_whole_segments_and_at_least_one(
    tmp_path: Path, start: int, max_rows: int | None, expected: int
) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    for commits in THREE:
        writer.append(transactions(*commits))
        writer.seal()
    writer.append(Idle(at(50)))
    writer.seal(quiet=True)
    assert SpoolReader(tmp_path).limit(at(start), max_rows=max_rows) == at(expected)


def test_the_limit_counts_bytes(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    reader = SpoolReader(tmp_path)
    first, second, _ = (segment.bytes for segment in reader.segments())
    assert reader.limit(at(0), max_bytes=first + second) == at(30)
    assert reader.limit(at(0), max_bytes=first + second - 1) == at(10)


def test_only_new_manifests_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(tmp_path, 0, THREE)
    reader = SpoolReader(tmp_path)
    first = reader.segments()
    read: list[Path] = []
    real = storage.read

    def counted(path: Path) -> bytes | None:
        read.append(path)
        return real(path)

    monkeypatch.setattr(storage, "read", counted)
    assert reader.segments() == first
    capture(tmp_path, 40, [[Commit(50)]])
    read.clear()
    assert reader.segments()[:3] == first
    assert [path.parent.name for path in read] == [f"{50:016X}"]


def test_a_directory_without_manifest_is_no_segment_until_it_has_one(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    reader = SpoolReader(tmp_path)
    manifest = tmp_path / "segments" / f"{40:016X}" / "manifest.json"
    data = manifest.read_bytes()
    manifest.unlink()
    (tmp_path / "segments" / "notes").mkdir()
    assert reader.end == at(30)
    manifest.write_bytes(data)
    assert reader.end == at(40)


def test_segments_that_vanish_are_forgotten(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    reader = SpoolReader(tmp_path)
    assert reader.start == at(0)
    shutil.rmtree(tmp_path / "segments" / f"{10:016X}")
    assert reader.start == at(10)
    shutil.rmtree(tmp_path)
    assert reader.end is None


def test_a_manifest_that_vanished_under_a_reader_is_a_gap_and_the_rest_stays_readable(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    reader = SpoolReader(tmp_path)
    assert reader.end == at(40)
    (tmp_path / "segments" / f"{10:016X}" / "manifest.json").unlink()
    with pytest.raises(SpoolGapError):
        reader.read(at(0), at(40))
    assert changes(reader.read(at(30), at(40))) == {"orders": [("orders", 40, 0)]}


def test_a_spool_captured_again_under_a_reader_is_seen_as_it_is_now(tmp_path: Path) -> None:
    capture(tmp_path, 0, [[Commit(10)], [Commit(20), Commit(30)]])
    reader = SpoolReader(tmp_path)
    reader.segments()
    manifest = tmp_path / "segments" / f"{30:016X}" / "manifest.json"
    kept = manifest.parent.stat().st_ino
    # The worst case, which a file system that reuses inodes brings about: the same directory, another
    # segment.
    for path in manifest.parent.iterdir():
        path.unlink()
    shutil.rmtree(tmp_path / "segments" / f"{10:016X}")
    capture(tmp_path / "again", 0, [[Commit(10), Commit(20), Commit(30)]])
    for path in (tmp_path / "again" / "segments" / f"{30:016X}").iterdir():
        path.rename(manifest.parent / path.name)
    assert manifest.parent.stat().st_ino == kept
    assert changes(reader.read(at(0), at(30))) == {
        "orders": [("orders", position, 0) for position in (10, 20, 30)]
    }


def test_a_segment_captured_again_from_further_back_replaces_the_shorter_one(tmp_path: Path) -> None:
    capture(tmp_path, 20, [[Commit(30)]])
    reader = SpoolReader(tmp_path)
    short = reader.read(at(20), at(30))
    capture(tmp_path, 10, [[Commit(20), Commit(30)]])
    assert changes(short) == {"orders": [("orders", 30, 0)]}, "files that a reader was given stay"
    assert changes(reader.read(at(10), at(30))) == {"orders": [("orders", 20, 0), ("orders", 30, 0)]}
    capture(tmp_path, 20, [[Commit(30)]])
    assert changes(reader.read(at(10), at(30))) == {"orders": [("orders", 20, 0), ("orders", 30, 0)]}


def test_a_newer_format_is_refused_not_skipped(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    manifest = tmp_path / "segments" / f"{30:016X}" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"format":3', b'"format":4'))
    with pytest.raises(SpoolFormatError):
        SpoolReader(tmp_path).segments()


def test_paths_are_absolute_also_for_a_relative_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    capture(Path("spool"), 0, [[Commit(10)]])
    (part,) = SpoolReader(Path("spool")).read(at(0), at(10)).tables[ORDERS.name].slices
    assert os.fspath(part.path).startswith(os.fspath(tmp_path))
