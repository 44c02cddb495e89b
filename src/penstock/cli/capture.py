"""`penstock capture`: capture one slot into one spool in the foreground; and `penstock drop`: remove a
pipeline from its source.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console
from rich.markup import escape

from penstock.capture.factory import open_capture
from penstock.config.model import load_config
from penstock.errors import SpoolLockedError
from penstock.pipeline.sources.adapter import source_adapter
from penstock.pipeline.sources.capture_process import forget_consumer, plan_capture
from penstock.pipeline.sources.drop import plan_drop, run_drop
from penstock.pipeline.table_selection import await_tables
from penstock.position import Position
from penstock.spool.retention import inspect_consumers
from penstock.spool.status import CaptureStatus, load_status


def on_signals(stop: Callable[[int], None]) -> None:
    """Call `stop` on SIGINT and SIGTERM. A second signal ends the process at once."""

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop(number)

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)


_POLL_SECONDS = 0.2
_LINE_SECONDS = 60.0
_LOCK_SECONDS = 5.0
_BEYOND = Position.of((1 << 64) - 1)


def run_capture(path: Path, console: Console) -> int:
    """Capture until a signal stops it. Returns the exit code."""
    ended_by: list[int] = []
    stopping = threading.Event()

    def stop(number: int) -> None:
        ended_by.append(number)
        stopping.set()

    on_signals(stop)
    lines = _Lines(console)
    config = load_config(path)
    if config.source.process == "separate" and source_adapter(config).needs_tables_first:
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
    """Remove a consumer from the spool and print the remaining ones."""
    config = load_config(path)
    forget_consumer(config, consumer)
    left = ", ".join(f"{each.name} at {each.released}" for each in inspect_consumers(config.spool)) or "none"
    console.print(
        f"removed consumer {escape(consumer)}; remaining: {escape(left)}", highlight=False, soft_wrap=True
    )
    return 0


class _Lines:
    """Prints a line when the state changes, and otherwise one per minute."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: tuple[str, str] | None = None
        self._due = 0.0

    def say(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def tell(self, status: CaptureStatus | None) -> None:
        if status is None:
            return
        waits = "".join(f"; waiting for {each.describe()}" for each in status.waits_for)
        told = (status.state, status.failure.code if status.failure is not None else "")
        if told != self._told or time.monotonic() >= self._due:
            self._told, self._due = told, time.monotonic() + _LINE_SECONDS
            rows = f"{status.rows_total:,} rows, sealed {status.sealed}, confirmed {status.confirmed}"
            self.say(f"  {status.state}{waits}: {rows}")


def drop_pipeline(path: Path, *, is_sure: bool) -> int:
    """List the objects to drop, ask for confirmation, and drop them. Returns the exit code."""
    config = load_config(path)
    plan = plan_drop(config)
    for each in plan.kept:
        typer.echo(f"keeps: {each}")
    if not plan.dropped:
        typer.echo(f"pipeline {config.pipeline} has no objects to drop at its source")
        return 0
    for each in plan.dropped:
        typer.echo(f"{'drops' if is_sure else 'would drop'}: {each}")
    typer.echo(
        f"keeps: target tables and epoch records in {config.sink.root}, state directory {config.state}"
    )
    typer.echo("after this the pipeline cannot continue from its position")
    if not is_sure and not typer.confirm("drop these objects?"):
        return 1
    run_drop(config, plan)
    typer.echo("dropped")
    return 0
