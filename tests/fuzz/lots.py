"""Run a batch of cases in a child process, and report the failing case even if the process dies."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.fuzz.cases import Lot
from tests.fuzz.findings import Case, judge_any, save, shrink
from tests.fuzz.judge import Finding
from tests.fuzz.values import ValueLot

LOTS: Mapping[str, Callable[[int], Lot | ValueLot]] = {"streams": Lot, "values": ValueLot}

_STRETCH_CASES = 500
_STRETCH_SECONDS = 60
"""CPU time of the process: on a busy machine, or while the process is stopped, wall time is meaningless."""


@dataclass
class Tally:
    cases: int = 0
    decoded: int = 0
    refused: int = 0
    findings: dict[str, str] = field(default_factory=dict)
    """Descriptions of the findings, by case."""

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.decoded += other.decoded
        self.refused += other.refused
        self.findings |= other.findings


def run_lot(subject: str, number: int, size: int, parent: int) -> Tally:
    """In a child of the process `parent`; ends when that does."""
    tally = Tally()
    lot = LOTS[subject](number)
    signal.signal(signal.SIGVTALRM, _too_long)
    place = place_of(number)
    descriptor = os.open(place, os.O_CREAT | os.O_WRONLY)
    try:
        for index in range(size):
            if index % _STRETCH_CASES == 0:
                signal.setitimer(signal.ITIMER_VIRTUAL, _STRETCH_SECONDS)
                if os.getppid() != parent:
                    os._exit(1)
            os.pwrite(descriptor, b"%08d" % index, 0)
            _judge(tally, f"{subject}:{number}:{index}", lot.case(index))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        os.close(descriptor)
    place.unlink()
    return tally


def _judge(tally: Tally, name: str, case: Case) -> None:
    tally.cases += 1
    try:
        if judge_any(case):
            tally.decoded += 1
        else:
            tally.refused += 1
    except Finding as finding:
        print(f"case {name}: {finding}", flush=True)
        tally.findings[name] = str(finding)
        save(name.replace(":", "-"), shrink(case, finding), finding)


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError("a case does not come to an end")


def place_of(number: int) -> Path:
    """The file in which a process records its current case, in case it dies."""
    return Path(tempfile.gettempdir(), f"penstock-fuzz-{os.getuid()}-{number}")
