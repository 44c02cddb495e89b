"""How a command that runs in the foreground is ended."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


def on_signals(stop: Callable[[int], None]) -> None:
    """Let SIGINT and SIGTERM end a command in order; a second one ends the process at once."""

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop(number)

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
