"""`SpoolFollower`: reads the spool behind a capture that is a process of its own.

It stands where a `SpoolCapture` stands in a reader that captures by itself, and starts nothing: it looks at the spool, again and again. A
capture that is not there, or has failed, is waited for, since starting it anew is all that is needed for its readers to go on; who waits
is told why by `missing_capture`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.capture.settings import CaptureSettings
from penstock.errors import CaptureMissingError, ConfigError, SpoolFormatError
from penstock.position import Position
from penstock.postgres.types.policy import TypePolicy
from penstock.spool.identity import load_identity
from penstock.spool.lock import is_locked
from penstock.spool.reader import SpoolReader
from penstock.spool.status import load_status

_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.05


class SpoolFollower:
    """For one thread; `stop` from any."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._reader = SpoolReader(settings.spool)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Nothing to start: the capture is somebody else's."""

    def stop(self) -> None:
        self._stopping.set()

    def wait_beyond(self, position: Position, timeout_seconds: float) -> bool:
        """Wait, at most so long, until the spool reaches past `position`."""
        return self._wait(lambda end: end > position, timeout_seconds)

    def wait_until(self, position: Position, timeout_seconds: float) -> bool:
        """Wait, at most so long, until the spool holds everything up to `position`."""
        return self._wait(lambda end: end >= position, timeout_seconds)

    def _wait(self, reached: Callable[[Position], bool], timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            end = self._reader.end
            if end is not None and reached(end):
                return True
            left = deadline - time.monotonic()
            if left <= 0 or self._stopping.wait(min(pause, left)):
                return False
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)


def missing_capture(spool: Path) -> CaptureMissingError | None:
    """Why nobody captures into the spool now; None while somebody does."""
    if is_locked(spool):
        return None
    status = load_status(spool)
    failure = status.failure if status is not None else None
    if failure is None:
        reason, hint = "", "start `penstock capture` with a configuration that names this spool"
    else:
        reason = f", and ended with {failure.code}: {failure.message}"
        hint = f"{failure.hint}; then start `penstock capture` again" if failure.hint else "start `penstock capture` again"
    return CaptureMissingError(f"the capture into {spool} is not running{reason}", hint=hint)


def check_shared(spool: Path, slot: str, origin: str, types: TypePolicy) -> None:
    """Raise unless the spool is one that a reader of this configuration can follow. One that nobody has captured into yet is."""
    identity = load_identity(spool)
    if identity is not None and (identity.slot, identity.publication) != (slot, origin):
        raise SpoolFormatError(
            f"the spool at {spool} holds {identity.slot} by {identity.publication}, not {slot} by {origin}",
            hint="give source.capture, source.slot, source.publication and source.spool the same values as in the capture's configuration",
        )
    status = load_status(spool)
    if status is not None and status.numeric not in (None, types.writes):
        if "text" in (status.numeric, types.writes):
            raise ConfigError(
                f"the capture into {spool} writes values {_as(status.numeric)}, and this pipeline reads them {_as(types.writes)}",
                hint="give pipelines into Postgres a capture and a spool of their own, apart from pipelines into other sinks",
            )
        raise ConfigError(
            f"types.numeric is {types.numeric}, and the capture into {spool} writes {status.numeric}",
            hint=f"set types.numeric to {status.numeric}, as in the capture's configuration; if that is new there, start the capture first",
        )


def _as(writes: str | None) -> str:
    return "as text" if writes == "text" else "with types"
