"""The pause of a capture between two seals, by the backlog of its consumers."""

from __future__ import annotations

import pytest

from penstock.capture.slot_capture import seal_pause_seconds

DAY_SECONDS = 86_400


def test_the_pause_grows_and_shrinks_with_the_backlog() -> None:
    pauses = [seal_pause_seconds(0.02, waiting) for waiting in (0, 50, 100, 300, 1000, 3000, 5000, 100_000)]
    assert pauses == pytest.approx([0.02, 0.02, 0.02, 0.18, 2.0, 18.0, 30.0, 30.0])


@pytest.mark.parametrize("configured_seconds", [60.0, 0.5])
def test_a_longer_configured_pause_is_kept(configured_seconds: float) -> None:
    assert seal_pause_seconds(configured_seconds, 0) == configured_seconds
    assert seal_pause_seconds(configured_seconds, 100_000) == max(configured_seconds, 30.0)


def test_without_a_minimum_the_pause_still_grows() -> None:
    assert seal_pause_seconds(0.0, 10_000) > 1


def test_the_segments_of_a_day_without_consumer_stay_in_the_thousands() -> None:
    waiting, now = 0, 0.0
    while now < DAY_SECONDS:
        now += seal_pause_seconds(0.02, waiting)
        waiting += 1
    assert waiting < 6000
