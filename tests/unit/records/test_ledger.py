"""Acknowledging by position, on top of single acknowledgements."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.capture.watermark import AckWatermark
from penstock.contracts.records import RecordPosition
from penstock.errors import NoRowsError, RecordGoneError, SpoolCorruptError
from penstock.position import Position
from penstock.records.builder import ChangePlace, SnapshotPlace, parse_place
from penstock.records.stream import AckLedger

POSITIONS = st.integers(0, 2**64 - 1).map(Position.of)
PLACES = st.one_of(
    st.builds(ChangePlace, POSITIONS, st.integers(0, 10**17)),
    st.builds(ChangePlace, POSITIONS),
    st.builds(SnapshotPlace, POSITIONS, st.integers(0, 10**17)),
)


@given(PLACES)
def test_place_survives_as_text(place: ChangePlace | SnapshotPlace) -> None:
    assert parse_place(RecordPosition(str(place.render()))) == place


@pytest.mark.parametrize(
    "text", ["", "0/1:", "0/1:-1", " 0/1", "0/1:1 ", "snapshot:0/1", "0/G", "0/1:1:1", "123", "x" * 10_000]
)
def test_text_that_is_no_place_is_refused_and_not_repeated_at_length(text: str) -> None:
    with pytest.raises(RecordGoneError) as caught:
        parse_place(RecordPosition(text))
    assert len(str(caught.value)) < 300


def test_end_of_a_commit_is_behind_its_changes() -> None:
    at = Position.of(10)
    assert ChangePlace(at, 0) < ChangePlace(at, 10**17) < ChangePlace(at) < ChangePlace(Position.of(11), 0)


TRANSACTIONS = st.lists(st.integers(1, 4), min_size=1, max_size=8)
"""How many changes each has."""


@settings(max_examples=40)
@given(TRANSACTIONS, st.data())
def test_resume_point_is_the_last_transaction_that_is_wholly_acknowledged(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    watermark, ledger = AckWatermark(Position.ZERO), AckLedger(tmp_path_factory.mktemp("spool"))
    delivered: list[ChangePlace] = []
    acked = ChangePlace(Position.ZERO)
    for number, size in enumerate(sizes, 1):
        position = Position.of(number * 100)
        for ordinal in range(size):
            place = ChangePlace(position, ordinal)
            ack = watermark.deliver(position)
            if ordinal == size - 1:
                watermark.settle(position)
            ledger.deliver(place, ack)
            delivered.append(place)
            if data.draw(st.booleans()):
                chosen = data.draw(st.sampled_from(delivered))
                acked = max(acked, chosen)
                ledger.ack(chosen)
                ledger.settle(at_once=True)
            whole = [
                at * 100
                for at, count in enumerate(sizes[:number], 1)
                if acked >= ChangePlace(Position.of(at * 100), count - 1)
            ]
            assert watermark.resume == Position.of(max(whole, default=0))


def test_acknowledgement_is_stored_before_it_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watermark, ledger = AckWatermark(Position.ZERO), AckLedger(tmp_path)
    place = ChangePlace(Position.of(100), 0)
    ack = watermark.deliver(place.position)
    watermark.settle(place.position)
    ledger.deliver(place, ack)

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("penstock.storage.put", fail)
        with pytest.raises(Exception, match="the disk is full"):
            ledger.ack(place)
    assert watermark.resume == Position.ZERO
    ledger.settle(at_once=True)
    assert watermark.resume == place.position
    assert AckLedger(tmp_path).acked == place


def test_repeated_changes_that_were_acknowledged_are_confirmed_at_once(tmp_path: Path) -> None:
    place = ChangePlace(Position.of(100), 1)
    first = AckLedger(tmp_path)
    first.ack(place)
    first.settle(at_once=True)
    for ledger in (first, AckLedger(tmp_path)):
        ledger.restart()
        watermark = AckWatermark(Position.ZERO)
        acks = [watermark.deliver(place.position) for _ in range(3)]
        watermark.settle(place.position)
        for ordinal, ack in enumerate(acks):
            ledger.deliver(ChangePlace(place.position, ordinal), ack)
        assert watermark.resume == Position.ZERO, "the third of them is not acknowledged"
        assert [ack.is_confirmed for ack in acks] == [True, True, False]


def test_stored_state_of_another_process_never_moves_backward(tmp_path: Path) -> None:
    first, second = AckLedger(tmp_path), AckLedger(tmp_path)
    early, late = ChangePlace(Position.of(100)), ChangePlace(Position.of(200))
    first.ack(late)
    first.close()
    assert second.acked < early, "it began before that"
    second.ack(early)
    second.settle(at_once=True)
    assert second.acked == AckLedger(tmp_path).acked == late
    third = AckLedger(tmp_path)
    (tmp_path / "records.json").write_text('{"format": 2, "acked": "0/12C"}', encoding="utf-8")
    assert third.refresh() == third.acked == ChangePlace(Position.of(300))


def test_acknowledgement_after_the_end_is_refused_and_moves_nothing(tmp_path: Path) -> None:
    ledger = AckLedger(tmp_path)
    ledger.ack(ChangePlace(Position.of(100)))
    ledger.close()
    with pytest.raises(NoRowsError):
        ledger.ack(ChangePlace(Position.of(200)))
    assert AckLedger(tmp_path).acked == ChangePlace(Position.of(100))


def test_memory_is_kept_per_transaction(tmp_path: Path) -> None:
    watermark, ledger = AckWatermark(Position.ZERO), AckLedger(tmp_path)
    acks = []
    for ordinal in range(1000):
        acks.append(watermark.deliver(Position.of(100)))
        ledger.deliver(ChangePlace(Position.of(100), ordinal), acks[-1])
    assert [ack.is_confirmed for ack in acks] == [True] * 999 + [False]
    assert ledger.waiting == 1
    assert watermark.resume == Position.ZERO


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"format": 2}', '{"format": 2, "acked": "x"}', '{"format": 2, "acked": "snapshot:0/1:1"}'],
)
def test_note_that_cannot_be_read_is_no_reason_to_begin_anywhere(tmp_path: Path, text: str) -> None:
    (tmp_path / "records.json").write_text(text, encoding="utf-8")
    with pytest.raises(SpoolCorruptError):
        AckLedger(tmp_path)
