"""Wait for a condition until a deadline, and fail with a message that shows the last state."""

from __future__ import annotations

from collections.abc import Callable

from penstock.testing import streams

DEADLINE_SECONDS = 60.0
"""For conditions that take a moment on an idle machine."""


def wait_for(
    condition: Callable[[], object],
    what: str,
    state: Callable[[], object] = lambda: "unknown",
    seconds: float = DEADLINE_SECONDS,
) -> None:
    streams.wait_for(lambda: bool(condition()), what, state, seconds)
