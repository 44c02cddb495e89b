"""Waiting for the capture, which may run in another process: by looking at the spool, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.errors import CaptureFailedError
from penstock.position import Position
from penstock.spool.reader import SpoolReader
from penstock.spool.status import load_status

FIRST_PAUSE_SECONDS = 0.002
LONGEST_PAUSE_SECONDS = 0.05


def wait_for_end(
    reader: SpoolReader,
    position: Position,
    *,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Position | None:
    """Wait until the spool reaches `position`; gives how far it reaches then, which is less when the time ran out.

    `CaptureFailedError` as soon as the capture says that it cannot go on by itself, unless the spool reaches far enough already.
    """
    deadline = clock() + timeout_seconds
    pause = FIRST_PAUSE_SECONDS
    while True:
        end = reader.end
        if end is not None and end >= position:
            return end
        _raise_if_stopped(reader)
        left = deadline - clock()
        if left <= 0:
            return end
        sleep(min(pause, left))
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)


def _raise_if_stopped(reader: SpoolReader) -> None:
    status = load_status(reader.root)
    if status is not None and status.failure is not None and status.has_stopped:
        raise CaptureFailedError(f"the capture has stopped: {status.failure.code}: {status.failure.message}", hint=status.failure.hint)
