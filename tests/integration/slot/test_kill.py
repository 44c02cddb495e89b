"""L01 for the capture alone: SIGKILL at any moment, under load. Also the cost of an idle capture."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from penstock.capture.settings import CaptureLimits
from penstock.position import Position
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release
from tests.support.slot.source import QUICK, Source
from tests.support.waiting import DEADLINE_SECONDS, wait_for

ROOT = Path(__file__).parents[3]
KILLS = 10
IDLE_SECONDS = 5.0


class Captures:
    """Starts captures as processes and ends the remaining ones."""

    def __init__(self, source: Source, limits: CaptureLimits = QUICK) -> None:
        self._options = json.dumps(source.settings(limits).to_options())
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.support.slot.capture_processes"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._pids: list[int] = []

    def start(self) -> int:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(self._options, file=self._parent.stdin, flush=True)
        self._pids.append(int(self._parent.stdout.readline()))
        return self._pids[-1]

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not psutil.pid_exists(pid), "a process that is gone", lambda: pid)
        self._pids.remove(pid)

    def close(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._parent.kill()
        self._parent.communicate()


@contextmanager
def captures(source: Source, limits: CaptureLimits = QUICK) -> Iterator[Captures]:
    made = Captures(source, limits)
    try:
        yield made
    finally:
        made.close()


class Workload:
    """Transactions of all sizes, some of them rolled back, until stopped."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._ending = threading.Event()
        self._choice = random.Random(random.random())
        self.rows = 0
        self._thread = threading.Thread(target=self._run, name="workload", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._source.database.connect() as connection:
            while not self._ending.wait(0.005):
                low, count = self.rows + 1, self._choice.choice([1, 1, 10, 10, 100, 100, 5000])
                connection.execute(
                    "INSERT INTO public.t SELECT i, 'x' FROM generate_series(%s::bigint, %s) i",
                    [low, low + count - 1],
                )
                if self._choice.random() < 0.2:
                    connection.rollback()
                else:
                    connection.commit()
                    self.rows += count

    def end(self) -> int:
        self._ending.set()
        self._thread.join(timeout=DEADLINE_SECONDS)
        return self.rows


def test_L01_the_spool_holds_every_committed_row_once_after_ten_kills_under_load(source: Source) -> None:
    """A consumer reads and releases segments between two kills, so that the slot moves too."""
    seen: list[int] = []
    done: Position | None = None
    before = source.confirmed

    def consume() -> None:
        nonlocal done
        end = SpoolReader(source.spool).end
        if end is not None and end != done:
            seen.extend(source.ids(done, end))
            done = release(source.spool, "pipeline", end)

    with captures(source) as processes:
        workload = Workload(source)
        for _ in range(KILLS):
            pid = processes.start()
            time.sleep(random.uniform(0.05, 0.7))  # the moment is the point
            processes.kill(pid)
            consume()
        rows = workload.end()
        goal = source.position
        processes.start()

        def is_level() -> bool:
            consume()
            return done is not None and done >= goal

        wait_for(is_level, f"everything up to {goal}", source.state)
    assert seen == list(range(1, rows + 1))
    assert rows > 100
    assert source.confirmed > before


def test_an_idle_capture_costs_next_to_nothing(source: Source) -> None:
    """At most 2 % of a core, with the settings that a pipeline has."""
    with captures(source, CaptureLimits()) as processes:
        pid = processes.start()
        wait_for(
            lambda: source.status is not None and source.status.lag is not None,
            "a capture at work",
            source.state,
        )
        process = psutil.Process(pid)
        used, started = process.cpu_times(), time.monotonic()
        time.sleep(IDLE_SECONDS)
        now, elapsed = process.cpu_times(), time.monotonic() - started
        share = (now.user - used.user + now.system - used.system) / elapsed
    assert share <= 0.02, f"{share:.1%} of a core"
