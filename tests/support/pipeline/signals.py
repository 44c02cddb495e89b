"""Signals sent to a pipeline that runs in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from penstock.position import Position
from penstock.sinks.base import Sink, TableChanges, Target
from tests.support.fix_pipeline import Mirror
from tests.support.fix_postgres import Database

if TYPE_CHECKING:
    pass


def signalled_once(patch: pytest.MonkeyPatch, sink: type[Sink], sent: int) -> list[int]:
    """The next epoch begins with this signal; the returned list is then empty."""
    apply, waiting = sink.apply, [sent]

    def signalled(self: Sink, target: Target, changes: TableChanges, end: Position) -> None:
        if waiting:
            os.kill(os.getpid(), waiting.pop())
        apply(self, target, changes, end)

    patch.setattr(sink, "apply", signalled)
    return waiting


@contextmanager
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def is_active(database: Database, mirror: Mirror) -> bool:
    return bool(
        database.query("SELECT active FROM pg_replication_slots WHERE slot_name = %s", mirror.slot)[0][0]
    )
