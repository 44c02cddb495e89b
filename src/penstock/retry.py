"""Pauses of loops that wait: backoff after errors, and intervals between checks of a condition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_JITTER = 0.5
"""Pauses vary by this fraction, so that processes that failed together do not retry together."""
_POLL_GROWTH = 1.5


@dataclass(slots=True)
class Backoff:
    """Exponential backoff with jitter: counts consecutive failures and returns the pause before the next
    attempt.

    Not thread-safe.
    """

    first_seconds: float = 1.0
    longest_seconds: float = 30.0
    failures: int = 0
    """Consecutive failures since the last `reset`."""

    @property
    def seconds(self) -> float:
        """The pause after the latest failure, without jitter; for messages."""
        doublings = max(0, self.failures - 1)
        return min(self.first_seconds * 2.0 ** min(doublings, 64), self.longest_seconds)

    def fail(self) -> float:
        """Count a failure; returns the seconds to wait, with jitter."""
        self.failures += 1
        return self.seconds * random.uniform(1 - _JITTER, 1 + _JITTER)

    def reset(self) -> None:
        self.failures = 0


def poll_pauses(first_seconds: float, longest_seconds: float) -> Iterator[float]:
    """The pauses between checks of a condition: short at first for a low latency, then longer to save CPU.

    There is no jitter, because nothing has failed: a check reads local files.
    """
    pause = first_seconds
    while True:
        yield pause
        pause = min(pause * _POLL_GROWTH, longest_seconds)
