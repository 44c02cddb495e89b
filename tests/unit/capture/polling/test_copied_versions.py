"""Persistence of copied row versions."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock.capture.polling.copies import CopiedVersions, KnownCopies
from penstock.position import Position
from penstock.postgres.polled_tables import RowBlock


def copy(at: int, *versions: str) -> CopiedVersions:
    return CopiedVersions(Position.of(at), 1 << 40, pa.array(versions, pa.string()))


def test_copies_between_two_looks_are_found_in_their_order(tmp_path: Path) -> None:
    known = KnownCopies(tmp_path / "keys")
    assert known.load(Position.ZERO, Position.of(9)) == {}
    for oid, at in ((1, 7), (1, 6), (2, 6), (1, 5), (1, 8)):
        known.store(oid, copy(at, f"{oid}(0,{at}):5"))
    found = known.load(Position.of(5), Position.of(8))
    assert {oid: [each.position.value for each in copies] for oid, copies in found.items()} == {
        1: [6, 7],
        2: [6],
    }
    assert found[2][0].horizon == 1 << 40
    assert found[2][0].versions.to_pylist() == ["2(0,6):5"]


def test_copies_before_a_durable_poll_are_forgotten(tmp_path: Path) -> None:
    known = KnownCopies(tmp_path)
    for at in (6, 7, 8):
        known.store(1, copy(at))
    known.forget(Position.of(7))
    assert [each.position.value for each in known.load(Position.ZERO, Position.of(9))[1]] == [8]


@pytest.mark.parametrize("content", [b"", b"PAR1"])
def test_copy_that_cannot_be_read_is_as_good_as_lost(tmp_path: Path, content: bytes) -> None:
    known = KnownCopies(tmp_path)
    known.store(1, copy(6))
    next(tmp_path.iterdir()).write_bytes(content)
    assert known.load(Position.ZERO, Position.of(9)) == {}


def test_copy_has_the_rows_of_older_transactions_and_of_those_it_names() -> None:
    versions, again = pa.array(["old", "named", "new"], pa.string()), pa.array([True] * 3)
    block = RowBlock(versions, again, [], [pa.array([False] * 3), pa.array([True, False, False])])
    assert copy(6, "named").has(block, 1).to_pylist() == [True, True, False]
    assert copy(6).has(block, 0).to_pylist() == [False, False, False]
    assert block.filter(pa.array([True, False, True])).is_before[1].to_pylist() == [True, False]
