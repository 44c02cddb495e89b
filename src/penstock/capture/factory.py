"""Create the capture thread for the given settings, or follow the spool of a separate capture process."""

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
    """Waits for changes in the spool of a separate capture process. It has the same start, stop and wait
    methods as `CaptureThread`, but starts no thread: the wait methods poll the spool. While the capture
    process does not run or has failed, they raise no error and return False after their timeout, since an
    operator can restart the process; `missing_capture` returns the reason. Used by one thread; any thread may
    call `stop`.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        self._reader = SpoolReader(settings.spool)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Does nothing: the capture runs in another process."""

    def stop(self) -> None:
        self._stopping.set()

    def wait_beyond(self, position: Position, timeout_seconds: float) -> bool:
        """Wait up to `timeout_seconds` until the spool extends past `position`; returns whether it does."""
        return self._wait(lambda end: end > position, timeout_seconds)

    def wait_until(self, position: Position, timeout_seconds: float) -> bool:
        """Wait up to `timeout_seconds` until the spool contains everything up to `position`; returns whether
        it does.
        """
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
    """Return the error that says why no capture writes to the spool, and how to start one. None if a capture
    writes to it.
    """
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
    """Raise unless the spool was captured from this slot and `origin`, with values in the format of `types`.
    `origin` is the publication or, with polling and triggers, the capture method. A spool that has never been
    written is accepted.
    """
    identity = load_identity(spool)
    if identity is not None and (identity.slot, identity.publication) != (slot, origin):
        raise SpoolFormatError(
            f"the spool at {spool} contains changes of {identity.slot} ({identity.publication}), "
            f"not of {slot} ({origin})",
            hint="give source.capture, source.slot, source.publication and source.spool the same values as "
            "in the capture's configuration",
        )
    status = load_status(spool)
    if status is not None and status.numeric not in (None, types.writes):
        if "text" in (status.numeric, types.writes):
            raise ConfigError(
                f"the capture into {spool} writes values {_as(status.numeric)}, but this pipeline reads "
                f"them {_as(types.writes)}",
                hint="use a separate capture and spool for pipelines into Postgres, and another for "
                "pipelines into other sinks",
            )
        raise ConfigError(
            f"types.numeric is {types.numeric}, but the capture into {spool} uses {status.numeric}",
            hint=f"set types.numeric to {status.numeric}, as in the capture's configuration; if that "
            "configuration has just been changed, restart the capture first",
        )


def _as(writes: str | None) -> str:
    return "as text" if writes == "text" else "as typed columns"


_CAPTURES: dict[CaptureMethod, Callable[[CaptureSettings], CaptureThread]] = {
    CaptureMethod.WAL: SpoolCapture,
    CaptureMethod.POLLING: lambda settings: open_polling(PollingSettings.of(settings)),
    CaptureMethod.TRIGGER: lambda settings: open_trigger(TriggerSettings.of(settings)),
}
"""The function that creates the capture thread, by capture method."""


def open_capture(settings: CaptureSettings) -> CaptureThread:
    """Create the capture thread for these settings, without starting it."""
    return _CAPTURES[settings.method](settings)


def open_polling(settings: PollingSettings) -> FeedCapture:
    return FeedCapture(PollingFeed(settings), settings.feed)


def open_trigger(settings: TriggerSettings) -> FeedCapture:
    return FeedCapture(TriggerFeed(settings), settings.feed)
