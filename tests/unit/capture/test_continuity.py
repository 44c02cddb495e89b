from __future__ import annotations

import pytest

from penstock.capture.source_checks import check_continuity
from penstock.errors import PositionGapError
from penstock.position import Position


def _at(value: int) -> Position:
    return Position.of(value)


@pytest.mark.parametrize(
    ("needed", "spool", "confirmed"),
    [
        (100, None, 100),
        (100, None, 50),
        (100, (80, 150), 120),
        (100, (100, 120), 120),
    ],
)
def test_a_reader_resumes_where_all_later_changes_are_available(
    needed: int, spool: tuple[int, int] | None, confirmed: int
) -> None:
    check_continuity(_at(needed), (_at(spool[0]), _at(spool[1])) if spool else None, _at(confirmed), "slot")


@pytest.mark.parametrize(
    ("needed", "spool", "confirmed"),
    [
        (100, None, 101),
        (100, (101, 150), 120),
        (100, (80, 119), 120),
        (100, (80, 90), 120),
    ],
)
def test_a_hole_is_never_crossed(needed: int, spool: tuple[int, int] | None, confirmed: int) -> None:
    with pytest.raises(PositionGapError) as caught:
        check_continuity(
            _at(needed), (_at(spool[0]), _at(spool[1])) if spool else None, _at(confirmed), "slot"
        )
    assert caught.value.hint
