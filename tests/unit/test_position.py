from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.position import Lsn, Position

lsns = st.integers(min_value=0, max_value=2**64 - 1).map(Lsn)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0/0", 0),
        ("0/16B3748", 0x16B3748),
        ("16/B374D848", 0x16_B374D848),
        ("ff/ff", 0xFF_000000FF),
        ("FFFFFFFF/FFFFFFFF", 2**64 - 1),
    ],
)
def test_lsn_parses_the_text_of_postgres(text: str, value: int) -> None:
    assert Lsn.parse(text).value == value
    assert str(Lsn(value)) == text.upper()


@pytest.mark.parametrize(
    "text", ["", "0", "/", "0/", "/0", "0/G", "-1/0", "0/123456789", "0/0\n", " 0/0", "0/0/0", "0x1/0", "٣/0"]
)
def test_lsn_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match="not an LSN"):
        Lsn.parse(text)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_lsn_has_64_bits(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        Lsn(value)


@given(lsns)
def test_lsn_text_round_trip(lsn: Lsn) -> None:
    assert Lsn.parse(str(lsn)) == lsn


@given(lsns, lsns)
def test_positions_are_ordered_as_their_addresses_are(one: Lsn, other: Lsn) -> None:
    assert (Position(one) < Position(other)) == (one.value < other.value)
    assert Position(one) - Position(other) == one - other == one.value - other.value


@given(lsns)
def test_position_survives_text_number_and_pickle(lsn: Lsn) -> None:
    position = Position(lsn)
    assert (
        Position.parse(str(position))
        == Position.of(position.value)
        == pickle.loads(pickle.dumps(position))
        == position
    )


def test_zero_is_before_everything() -> None:
    assert Position.ZERO.value == 0
    assert Position.of(1) > Position.ZERO
