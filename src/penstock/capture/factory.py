"""Open the capture that a configuration describes: a capture thread in this process, or a reader of the spool
of a separate capture process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.capture.polling.feed import PollingFeed
from penstock.capture.polling.settings import PollingSettings
from penstock.capture.pull import FeedCapture
from penstock.capture.settings import CaptureMethod, CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.capture.thread import CaptureThread
from penstock.capture.trigger.feed import TriggerFeed, TriggerSettings
from penstock.errors import CaptureMissingError, ConfigError, SpoolFormatError
from penstock.position import Position
from penstock.postgres.types.column import TypePolicy
from penstock.retry import poll_pauses
from penstock.spool.ownership import is_spool_locked, load_identity
from penstock.spool.reader import SpoolReader
from penstock.spool.status import load_status

_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.05


class SpoolFollower:
    """Waits for changes in the spool of a separate capture process. It has the interface of a capture thread,
    but starts nothing: it polls the spool. If that capture is missing or has failed, it waits, since the
    capture only needs to be restarted; `missing_capture` tells why. Used by one thread; any thread may call
    `stop`.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        self._reader = SpoolReader(settings.spool)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Does nothing: the capture runs in another process."""

    def stop(self) -> None:
        self._stopping.set()

    def wait_beyond(self, position: Position, timeout_seconds: float) -> bool:
        """Wait up to `timeout_seconds` until the spool extends past `position`."""
        return self._wait(lambda end: end > position, timeout_seconds)

    def wait_until(self, position: Position, timeout_seconds: float) -> bool:
        """Wait up to `timeout_seconds` until the spool contains everything up to `position`."""
        return self._wait(lambda end: end >= position, timeout_seconds)

    def _wait(self, reached: Callable[[Position], bool], timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        pauses = poll_pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while True:
            end = self._reader.end
            if end is not None and reached(end):
                return True
            left = deadline - time.monotonic()
            if left <= 0 or self._stopping.wait(min(next(pauses), left)):
                return False


def missing_capture(spool: Path) -> CaptureMissingError | None:
    """Why no capture runs for the spool; None if one does."""
    if is_spool_locked(spool):
        return None
    status = load_status(spool)
    failure = status.failure if status is not None else None
    if failure is None:
        reason, hint = "", "start `penstock capture` with a configuration that names this spool"
    else:
        reason = f", and ended with {failure.code}: {failure.message}"
        hint = (
            f"{failure.hint}; then start `penstock capture` again"
            if failure.hint
            else "start `penstock capture` again"
        )
    return CaptureMissingError(f"the capture into {spool} is not running{reason}", hint=hint)


def check_shared(spool: Path, slot: str, origin: str, types: TypePolicy) -> None:
    """Raise unless a reader with this configuration can use the spool. A spool that has never been written
    can be used.
    """
    identity = load_identity(spool)
    if identity is not None and (identity.slot, identity.publication) != (slot, origin):
        raise SpoolFormatError(
            f"the spool at {spool} holds {identity.slot} by {identity.publication}, not {slot} by {origin}",
            hint="give source.capture, source.slot, source.publication and source.spool the same values as "
            "in the capture's configuration",
        )
    status = load_status(spool)
    if status is not None and status.numeric not in (None, types.writes):
        if "text" in (status.numeric, types.writes):
            raise ConfigError(
                f"the capture into {spool} writes values {_as(status.numeric)}, and this pipeline reads "
                f"them {_as(types.writes)}",
                hint="give pipelines into Postgres a separate capture and spool from those of pipelines "
                "into other sinks",
            )
        raise ConfigError(
            f"types.numeric is {types.numeric}, and the capture into {spool} writes {status.numeric}",
            hint=f"set types.numeric to {status.numeric}, as in the capture's configuration; if that "
            "was changed just now, restart the capture first",
        )


def _as(writes: str | None) -> str:
    return "as text" if writes == "text" else "with types"


_CAPTURES: dict[CaptureMethod, Callable[[CaptureSettings], CaptureThread]] = {
    CaptureMethod.WAL: SpoolCapture,
    CaptureMethod.POLLING: lambda settings: open_polling(PollingSettings.of(settings)),
    CaptureMethod.TRIGGER: lambda settings: open_trigger(TriggerSettings.of(settings)),
}
"""The implementation of each capture method."""


def open_capture(settings: CaptureSettings) -> CaptureThread:
    """The capture that these settings describe. It is not started."""
    return _CAPTURES[settings.method](settings)


def open_polling(settings: PollingSettings) -> FeedCapture:
    return FeedCapture(PollingFeed(settings), settings.feed)


def open_trigger(settings: TriggerSettings) -> FeedCapture:
    return FeedCapture(TriggerFeed(settings), settings.feed)
