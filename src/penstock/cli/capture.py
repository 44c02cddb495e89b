"""`penstock capture`: one slot into one spool, in the foreground, until it is told to end."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from penstock.capture.choosing import open_capture
from penstock.cli.signals import on_signals
from penstock.errors import SpoolLockedError
from penstock.pipeline.capturing import forget_consumer, plan_capture
from penstock.pipeline.config import load_config
from penstock.pipeline.tables import await_tables
from penstock.position import Position
from penstock.spool.consumers import inspect_consumers
from penstock.spool.status import CaptureStatus, load_status

_POLL_SECONDS = 0.2
_LINE_SECONDS = 60.0
_LOCK_SECONDS = 5.0
_BEYOND = Position.of((1 << 64) - 1)


def run_capture(path: Path, console: Console) -> int:
    """Capture until a signal ends it; gives back the exit code."""
    ended_by: list[int] = []
    stopping = threading.Event()

    def stop(number: int) -> None:
        ended_by.append(number)
        stopping.set()

    on_signals(stop)
    lines = _Lines(console)
    config = load_config(path)
    if config.source.process == "separate" and config.source.capture != "trigger":
        found = await_tables(lambda: load_config(path), lines.say, stopping.wait)
        if found is None:
            return 130 if signal.SIGINT in ended_by else 0
        config = found
    settings = plan_capture(config)
    capture = open_capture(settings)
    lines.say(f"capturing slot {settings.slot} of {settings.address.describe()} into {settings.spool}")
    capture.start()
    locked_since = time.monotonic()
    try:
        while not stopping.is_set():
            capture.wait_until(_BEYOND, _POLL_SECONDS)
            if not isinstance(capture.trouble, SpoolLockedError):
                locked_since = time.monotonic()
                lines.tell(load_status(settings.spool))
            elif time.monotonic() - locked_since > _LOCK_SECONDS:
                raise capture.trouble
    finally:
        capture.stop()
    last = load_status(settings.spool)
    if last is not None:
        lines.say(f"stopped at {last.sealed}, confirmed {last.confirmed}")
    return 130 if signal.SIGINT in ended_by else 0


def run_forget(path: Path, consumer: str, console: Console) -> int:
    """Take a consumer out of the spool, and show who is left."""
    config = load_config(path)
    forget_consumer(config, consumer)
    left = ", ".join(f"{each.name} at {each.released}" for each in inspect_consumers(config.spool)) or "nobody"
    console.print(f"forgotten: {escape(consumer)}; left: {escape(left)}", highlight=False, soft_wrap=True)
    return 0


class _Lines:
    """A line when something changes, and one a minute."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: tuple[str, str] | None = None
        self._due = 0.0

    def say(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def tell(self, status: CaptureStatus | None) -> None:
        if status is None:
            return
        waits = "".join(f"; waits for {each.describe()}" for each in status.waits_for)
        told = (status.state, status.failure.code if status.failure is not None else "")
        if told != self._told or time.monotonic() >= self._due:
            self._told, self._due = told, time.monotonic() + _LINE_SECONDS
            rows = f"{status.rows_total:,} rows, sealed {status.sealed}, confirmed {status.confirmed}"
            self.say(f"  {status.state}{waits}: {rows}")
