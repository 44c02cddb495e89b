from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import SpoolCorruptError
from penstock.spool import (
    SpoolReader,
    SpoolWriter,
    release,
    released_by_all,
    released_positions,
    remove_consumer,
    spool_bytes,
)
from penstock.spool.retention import inspect_consumers, set_released
from tests.support.spool.builders import (
    ITEMS,
    ORDERS,
    Commit,
    at,
    capture,
    changes,
    delete_released,
    piece,
    transactions,
)

THREE = [[Commit(10)], [Commit(20, (ORDERS, ITEMS))], [Commit(30)]]


def test_a_release_never_moves_backward(tmp_path: Path) -> None:
    assert release(tmp_path, "one", at(20)) == at(20)
    assert release(tmp_path, "one", at(10)) == at(20)
    assert release(tmp_path, "one", at(30)) == at(30)
    assert released_positions(tmp_path) == {"one": at(30)}


def test_a_consumer_with_a_restored_target_keeps_its_released_position(tmp_path: Path) -> None:
    release(tmp_path, "one", at(20))
    release(tmp_path, "two", at(30))
    assert set_released(tmp_path, "one", at(10)) == at(10)
    assert released_by_all(tmp_path) == at(10)
    assert [(each.name, each.released, each.age_seconds < 60) for each in inspect_consumers(tmp_path)] == [
        ("one", at(10), True),
        ("two", at(30), True),
    ]


def test_a_consumer_without_anything_to_release_is_seen_to_run(tmp_path: Path) -> None:
    release(tmp_path, "one", at(20))
    os.utime(tmp_path / "consumers" / "one.json", (0, 0))
    release(tmp_path, "one", at(20))
    assert inspect_consumers(tmp_path)[0].age_seconds < 60


def test_the_minimum_is_over_all_consumers(tmp_path: Path) -> None:
    assert (released_positions(tmp_path), released_by_all(tmp_path)) == ({}, None)
    names = ["one", "../Two/é %", ".hidden"]
    for position, name in enumerate(names, 20):
        release(tmp_path, name, at(position))
    assert released_positions(tmp_path) == {name: at(position) for position, name in enumerate(names, 20)}
    assert released_by_all(tmp_path) == at(20)
    assert remove_consumer(tmp_path, "one")
    assert not remove_consumer(tmp_path, "never seen")
    assert released_by_all(tmp_path) == at(21)


def test_a_damaged_release_is_an_error_not_a_licence_to_delete(tmp_path: Path) -> None:
    release(tmp_path, "one", at(20))
    (tmp_path / "consumers" / "one.json").write_text('{"format": 1}')
    with pytest.raises(SpoolCorruptError, match=r"one\.json"):
        released_by_all(tmp_path)


def test_only_segments_released_by_every_consumer_are_deleted(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    reader = SpoolReader(tmp_path)
    assert delete_released(tmp_path) == []
    release(tmp_path, "one", at(25))
    release(tmp_path, "two", at(10))
    assert delete_released(tmp_path) == [at(10)]
    assert reader.start == at(10)
    release(tmp_path, "two", at(29))
    assert delete_released(tmp_path) == [at(20)]
    assert changes(reader.read(at(20), at(30))) == {"orders": [("orders", 30, 0)]}


def test_the_newest_segment_stays(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    release(tmp_path, "one", at(1000))
    reader = SpoolReader(tmp_path)
    assert delete_released(tmp_path) == [at(10), at(20)]
    assert reader.end == at(30)
    assert [path.name for path in (tmp_path / "segments").iterdir()] == [f"{30:016X}"]


def test_a_segment_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    capture(tmp_path, 0, THREE)
    release(tmp_path, "one", at(1000))
    for end in (15, 40):
        (tmp_path / "segments" / f"{end:016X}").mkdir()
        (tmp_path / "segments" / f"{end:016X}" / "a.parquet").write_bytes(b"PAR1")
    delete_released(tmp_path)
    assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == [
        f"{end:016X}" for end in (15, 30, 40)
    ]


def test_the_size_is_that_of_sealed_and_open_files(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0), piece_buffer_bytes=0)
    writer.append(transactions(Commit(10)))
    writer.seal()
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(piece(7, (ORDERS, 1)))
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    assert spool_bytes(SpoolReader(tmp_path)) == on_disk
