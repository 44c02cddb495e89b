"""`penstock run` as a process, from its start to SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.fix_pipeline import Mirror

PHASE_SECONDS = 300.0
COMMAND = [sys.executable, "-m", "penstock.cli.main", "run"]


@contextmanager
def started(mirror: Mirror, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, str(mirror.path)], stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill(process, everything=True)


def wait_for_word(phase: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the run prints this; a run whose snapshot is finished prints `Streaming` at once."""
    accepted = (phase, "Streaming") if phase == "Snapshot" else (phase,)
    deadline = time.monotonic() + PHASE_SECONDS
    while not any(word in log.read_text() for word in accepted):
        assert process.poll() is None, f"the run ended by itself:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, (
            f"{phase!r} was not reached in {PHASE_SECONDS} s:\n{log.read_text()[-3000:]}"
        )
        time.sleep(0.05)


def kill(process: subprocess.Popen[bytes], *, everything: bool) -> None:
    """Kill the driver alone, or its whole session: JVM, capture and Python workers too."""
    if everything:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait(timeout=30)
