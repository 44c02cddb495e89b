"""Backoff and poll intervals."""

from __future__ import annotations

from itertools import islice

from penstock.retry import Backoff, poll_pauses


def test_backoff_doubles_up_to_its_limit_and_starts_again_after_a_reset() -> None:
    backoff = Backoff(1.0, 5.0)
    pauses = []
    for _ in range(4):
        assert 0.5 * backoff.seconds <= backoff.fail() <= 1.5 * 5.0
        pauses.append(backoff.seconds)
    assert pauses == [1.0, 2.0, 4.0, 5.0]
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.seconds == 1.0


def test_poll_pauses_grow_up_to_their_limit() -> None:
    assert list(islice(poll_pauses(1.0, 2.0), 4)) == [1.0, 1.5, 2.0, 2.0]
