"""How tests wait: for a condition, up to a deadline, with a message that shows how things stood at the end."""

from __future__ import annotations

from collections.abc import Callable

from penstock.testing import streams

DEADLINE_SECONDS = 60.0
"""For what takes a moment on a machine with nothing else to do."""


def wait_for(
    condition: Callable[[], object], what: str, state: Callable[[], object] = lambda: "unknown", seconds: float = DEADLINE_SECONDS
) -> None:
    streams.wait_for(lambda: bool(condition()), what, state, seconds)
