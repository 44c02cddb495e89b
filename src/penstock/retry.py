"""Exponential backoff with jitter, for every loop that tries something again."""

from __future__ import annotations

import random
from dataclasses import dataclass

_JITTER = 0.5
"""Pauses vary by this fraction, so that several processes that failed together do not try again together."""


@dataclass(slots=True)
class Backoff:
    """Counts consecutive failures and gives the pause before the next attempt. Used by one thread at a time."""

    first_seconds: float = 1.0
    longest_seconds: float = 30.0
    failures: int = 0
    """Consecutive ones; `reset` forgets them."""

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
