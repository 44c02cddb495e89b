from __future__ import annotations

import os
import time
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from penstock.errors import SpoolCorruptError
from penstock.pipeline import epoch_log as epochs
from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName

TABLES = {
    TableName("public", "orders"): TableStatus(TableState.STREAMING, Position.of(20), Position.of(10)),
    TableName("public", "odd.name"): TableStatus(
        TableState.FAILED, None, None, "PEN-1402: no key", "add one"
    ),
}


def _epoch(number: int) -> Epoch:
    return Epoch(number, Position.of(number * 16), datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), "42", TABLES)


def _is_by(position: Position, epoch: Epoch) -> bool:
    return epoch.position <= position


def _directory(root: Path) -> Path:
    return root / "penstock_epochs" / "shop"


def test_the_last_record_is_read_back_unchanged(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, "shop")
    assert log.last() is None
    for number in (1, 2, 3):
        log.record(_epoch(number))
    assert log.last() == EpochLog(tmp_path, "shop").last() == _epoch(3)
    assert EpochLog(tmp_path, "other").last() is None


def test_many_records_are_folded_and_none_is_lost(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, "shop")
    for number in range(1, 600):
        log.record(_epoch(number))
    assert log.last() == _epoch(599)
    files = list(_directory(tmp_path).glob("*.json*"))
    assert len(files) < 260
    assert sum(len(path.read_text().splitlines()) for path in files) == 599


def test_folding_records_of_many_tables_holds_one_record_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "_FOLD_FILES", 40)
    streaming = TableStatus(TableState.STREAMING, Position.of(20), Position.of(10))
    tables = {TableName("public", f"t{number}"): streaming for number in range(300)}
    log = EpochLog(tmp_path, "shop")
    for number in range(1, 40):
        log.record(replace(_epoch(number), tables=tables))
    last = replace(_epoch(40), tables=tables)
    tracemalloc.start()
    log.record(last)
    _, folding_bytes = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    assert log.last() == last
    _, reading_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    folded = next(_directory(tmp_path).glob("*.jsonl"))
    assert len(folded.read_text().splitlines()) == 40
    assert folding_bytes < 2_000_000
    assert reading_bytes < 2_000_000


def test_records_are_forgotten_by_age_and_by_number_but_for_the_last(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, "shop")
    for number in range(1, 1100):
        log.record(_epoch(number))
    folded = sorted(_directory(tmp_path).glob("*.jsonl"))
    assert len(folded) == 4
    for path in folded:
        os.utime(path, (time.time() - 3000,) * 2)
    log.forget(86400, 256)
    log.forget(60, 256)
    assert len(sorted(_directory(tmp_path).glob("*.jsonl"))) == 4, "all of the last hour"
    for path in folded:
        os.utime(path, (time.time() - 7200,) * 2)
    log.forget(86400, 600)
    assert sorted(_directory(tmp_path).glob("*.jsonl")) == folded[1:]
    assert log.at(Position.of(16 * 256)) is None
    assert log.at(Position.of(16 * 257)) == _epoch(257)
    log.forget(3600, 10_000)
    assert sorted(_directory(tmp_path).glob("*.jsonl")) == folded[-1:]
    assert log.last() == _epoch(1099)


def test_a_record_that_was_never_renamed_into_place_does_not_count(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, "shop")
    log.record(_epoch(1))
    (_directory(tmp_path) / "00000000000000FF.tmp").write_text('{"format": 1, "epo')
    assert log.last() == _epoch(1)


def test_a_damaged_record_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, "shop")
    log.record(_epoch(1))
    next(_directory(tmp_path).glob("*.json")).write_text("{}")
    with pytest.raises(SpoolCorruptError):
        log.last()


def test_the_record_of_one_position_is_found_also_after_it_was_folded(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, "shop")
    assert log.at(Position.of(16)) is None
    for number in range(1, 600):
        log.record(_epoch(number))
    assert [log.at(Position.of(number * 16)) for number in (1, 256, 257, 599)] == [
        _epoch(number) for number in (1, 256, 257, 599)
    ]
    assert [log.at(Position.of(value)) for value in (0, 17, 599 * 16 + 1)] == [None, None, None]


def test_a_record_that_is_folded_while_it_is_read_is_found_where_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EpochLog(tmp_path, "shop")
    log.record(_epoch(1))
    small = next(_directory(tmp_path).glob("*.json"))
    glob = Path.glob

    def fold_after(path: Path, pattern: str) -> list[Path]:
        found = list(glob(path, pattern))
        if pattern == "*.jsonl" and small.exists():
            small.rename(small.with_suffix(".jsonl"))
        return found

    monkeypatch.setattr(Path, "glob", fold_after)
    assert log.last() == _epoch(1)


def test_the_newest_record_that_is_wanted_is_found_in_small_files_and_in_large_ones(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, "shop")
    assert log.newest(lambda _: True) is None
    for number in range(1, 600):
        log.record(_epoch(number))
    for number in (1, 255, 256, 257, 512, 513, 599):
        assert log.newest(partial(_is_by, Position.of(number * 16 + 3))) == _epoch(number)
    assert log.newest(lambda epoch: epoch.number > 600) is None
