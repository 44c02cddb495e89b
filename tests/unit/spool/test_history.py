from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import storage
from penstock.change import Transactions
from penstock.errors import SpoolCorruptError, SpoolFormatError
from penstock.schema import Column, TableName, TableSchema
from penstock.spool import SchemaHistory, SchemaVersion, SpoolWriter, release
from penstock.spool.history import HistoryRecorder
from penstock.spool.manifest import SpoolLayout
from tests.support.spool.builders import (
    ITEMS,
    ORDERS,
    Commit,
    at,
    batch,
    capture,
    committed,
    delete_released,
    piece,
    time_of,
    transactions,
)

WIDER = replace(ORDERS, columns=(*ORDERS.columns, Column("extra", pa.string(), 25)))
WIDEST = replace(WIDER, columns=(*WIDER.columns, Column("more", pa.int32(), 23)))
RENAMED = replace(ORDERS, name=TableName("public", "sales"))
RECREATED = replace(ORDERS, oid=17_000)


def versions(root: Path, oid: int = ORDERS.oid) -> list[tuple[int, TableSchema]]:
    return [(version.position.value, version.schema) for version in SchemaHistory.load(root).versions(oid)]


def test_S06_the_history_tells_the_shape_at_every_position(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(transactions(Commit(10), Commit(20, (WIDER,))))
    writer.seal()
    writer.append(transactions(Commit(30, (WIDER, ITEMS)), Commit(40, (RENAMED,))))
    writer.seal()
    history = SchemaHistory.load(tmp_path)
    assert versions(tmp_path) == [(10, ORDERS), (20, WIDER), (40, RENAMED)]
    found = [history.at(ORDERS.oid, at(position)) for position in (9, 10, 19, 20, 39, 40, 1 << 60)]
    assert found == [None, ORDERS, ORDERS, WIDER, WIDER, RENAMED, RENAMED]
    assert history.at(ITEMS.oid, at(30)) == ITEMS
    assert (history.current(ORDERS.oid), history.current(4711)) == (RENAMED, None)
    assert history.at(4711, at(30)) is None


def test_S05_schemas_within_one_transaction_are_in_order(tmp_path: Path) -> None:
    altered = Transactions(
        tuple(batch(table, [(20, ordinal)]) for ordinal, table in enumerate((ORDERS, WIDER, ORDERS, WIDEST))),
        at(20),
        time_of(20),
        1,
    )
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(transactions(Commit(10)))
    writer.append(altered)
    writer.seal()
    expected = [(10, ORDERS), (20, WIDER), (20, ORDERS), (20, WIDEST)]
    assert versions(tmp_path) == expected
    assert SchemaHistory.load(tmp_path).at(ORDERS.oid, at(20)) == WIDEST
    again = SpoolWriter(tmp_path, at(10))
    again.append(altered)
    again.append(transactions(Commit(30, (WIDEST,))))
    again.seal()
    assert versions(tmp_path) == expected, "captured again from elsewhere, it is the same history"


def test_pieces_of_a_long_transaction_are_in_the_history_once_it_has_committed(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (ORDERS, 0), (WIDER, 1)))
    assert versions(tmp_path) == []
    writer.append(committed(7, 50))
    assert versions(tmp_path) == [(50, ORDERS), (50, WIDER)]


def test_ground_that_was_lost_and_is_captured_again_takes_its_place_before_the_rest(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(20))
    writer.append(transactions(Commit(30, (WIDER,))))
    writer.seal()
    again = SpoolWriter(tmp_path, at(0))
    again.append(transactions(Commit(10), Commit(20, (WIDER,)), Commit(30, (WIDER,))))
    again.seal()
    assert versions(tmp_path) == [(10, ORDERS), (20, WIDER)]


def test_the_history_outlives_the_segments_as_far_as_a_consumer_may_ask(tmp_path: Path) -> None:
    capture(tmp_path, 0, [[Commit(10)], [Commit(20, (WIDER,))], [Commit(30, (WIDEST, ITEMS))]])
    release(tmp_path, "slow", at(20))
    assert delete_released(tmp_path) == [at(10), at(20)]
    assert versions(tmp_path) == [(10, ORDERS), (20, WIDER), (30, WIDEST)]
    capture(tmp_path, 30, [[Commit(40, (RENAMED,))]])
    assert versions(tmp_path) == [(20, WIDER), (30, WIDEST), (40, RENAMED)], (
        "versions that no reader needs are removed when a writer starts"
    )
    assert SchemaHistory.load(tmp_path).at(ORDERS.oid, at(25)) == WIDER
    release(tmp_path, "slow", at(1000))
    capture(tmp_path, 40, [[Commit(50, (WIDER,))]])
    capture(tmp_path, 50, [])
    assert (versions(tmp_path), versions(tmp_path, ITEMS.oid)) == ([(50, WIDER)], [(30, ITEMS)]), (
        "the current shape of a quiet table stays"
    )


def test_S07_a_dropped_and_recreated_table_leaves_the_history_once_all_consumers_are_past_it(
    tmp_path: Path,
) -> None:
    release(tmp_path, "one", at(10))
    capture(tmp_path, 0, [[Commit(20)], [Commit(30, (RECREATED,))]])
    assert versions(tmp_path) == [(20, ORDERS)]
    release(tmp_path, "one", at(30))
    capture(tmp_path, 30, [[Commit(40, (ITEMS,))]])
    assert versions(tmp_path) == []
    assert versions(tmp_path, RECREATED.oid) == [(30, RECREATED)]


@pytest.mark.parametrize("first", [100, 250])
def test_S07_a_table_that_took_the_name_of_another_stays_in_the_history_whichever_was_captured_first(
    first: int,
) -> None:
    staging = replace(RECREATED, name=TableName("public", "staging"))
    changes = [
        SchemaVersion(at(first), staging),
        SchemaVersion(at(200), ORDERS),
        SchemaVersion(at(300), RECREATED),
    ]
    history = SchemaHistory().recorded(sorted(changes, key=lambda change: change.position))
    assert set(history.pruned(at(260)).tables) == {ORDERS.oid, RECREATED.oid}, (
        "changes of both may still arrive"
    )
    assert set(history.pruned(at(300)).tables) == {RECREATED.oid}


def test_tables_with_one_name_in_one_transaction_all_stay() -> None:
    history = SchemaHistory().recorded([SchemaVersion(at(20), RECREATED), SchemaVersion(at(20), ORDERS)])
    assert history.pruned(at(30)) == history


def test_keys_are_those_at_a_position_and_not_of_a_segment_that_was_never_sealed() -> None:
    keyless = replace(ORDERS, key=())
    history = SchemaHistory().recorded(
        [SchemaVersion(at(20), ORDERS), SchemaVersion(at(30), keyless), SchemaVersion(at(30), ITEMS)]
    )
    assert history.keys(at(29)) == {ORDERS.oid: ORDERS.key}
    assert history.keys(at(30)) == {ORDERS.oid: (), ITEMS.oid: ITEMS.key}


def test_a_shape_is_in_the_history_before_its_segment_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(transactions(Commit(10)))
    real = storage.rename

    def rename(source: Path, target: Path) -> None:
        if target.name == "manifest.json":
            assert versions(tmp_path) == [(10, ORDERS)]
        real(source, target)

    monkeypatch.setattr(storage, "rename", rename)
    assert writer.seal() is not None


def test_nothing_is_known_of_a_spool_without_history(tmp_path: Path) -> None:
    assert SchemaHistory.load(tmp_path) == SchemaHistory()


def test_recording_a_known_schema_gives_the_same_history() -> None:
    history = SchemaHistory().recorded([SchemaVersion(at(10), ORDERS)])
    assert history.recorded([SchemaVersion(at(20), ORDERS)]) is history
    assert history.recorded([SchemaVersion(at(10), ORDERS)]) is history
    assert history.recorded([]) is history


def test_a_line_that_a_crash_cut_short_does_not_count_and_does_not_stay(tmp_path: Path) -> None:
    capture(tmp_path, 0, [[Commit(10)]])
    whole = SpoolLayout(tmp_path).history.read_bytes()
    SpoolLayout(tmp_path).history.write_bytes(whole + b'{"position":"0/14","table"')
    assert versions(tmp_path) == [(10, ORDERS)]
    capture(tmp_path, 10, [[Commit(20, (WIDER,))]])
    assert versions(tmp_path) == [(10, ORDERS), (20, WIDER)]


def test_a_new_shape_costs_a_line_and_not_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(transactions(Commit(10, (ORDERS, ITEMS))))
    writer.seal()
    before = SpoolLayout(tmp_path).history.read_bytes()
    monkeypatch.setattr(SchemaHistory, "store", lambda *_: pytest.fail("the whole history was written"))
    writer.append(transactions(Commit(20, (WIDER,))))
    writer.seal()
    assert SpoolLayout(tmp_path).history.read_bytes().startswith(before)
    assert versions(tmp_path) == [(10, ORDERS), (20, WIDER)]


def test_a_table_that_is_altered_without_end_does_not_fill_the_disk(tmp_path: Path) -> None:
    release(tmp_path, "one", at(1000))
    recorder = HistoryRecorder(tmp_path)
    for position in range(1, 250):
        recorder.record([SchemaVersion(at(position), ORDERS if position % 2 else WIDER)])
    assert len(versions(tmp_path)) <= 102


@pytest.mark.parametrize("text", ["", "{\n", '{"format": 1}\n{"position": "0/1"}\n', '{"format": 1}\n{\n'])
def test_a_damaged_history_is_named(tmp_path: Path, text: str) -> None:
    SpoolLayout(tmp_path).history.write_text(text, encoding="utf-8")
    with pytest.raises(SpoolCorruptError, match="history"):
        SchemaHistory.load(tmp_path)


def test_a_history_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    SpoolLayout(tmp_path).history.write_text('{"format": 99}\n', encoding="utf-8")
    with pytest.raises(SpoolFormatError, match="format 99"):
        SchemaHistory.load(tmp_path)
