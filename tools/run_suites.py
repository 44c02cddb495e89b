"""Run test suites side by side, show their progress line by line, and end with one summary.

Usage: python -m tools.run_suites [--lanes N] TARGET …

Each TARGET is a target of the Makefile that runs pytest once. A lane takes the next target when its last one
has ended, so name the longest first. The exit code is 1 if any suite failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

_CLOSING = re.compile(r"^=+ .*\d+ (passed|failed|error|skipped|deselected).* in [\d.]+s.*=+$")
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


@dataclass
class Suite:
    """One target. Only the lane that runs it changes it."""

    target: str
    process: subprocess.Popen[str] | None = None
    status: int | None = None
    closing: str = ""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def run(self) -> None:
        began = time.monotonic()
        self.process = subprocess.Popen(
            ["make", "--no-print-directory", self.target],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that Ctrl-C reaches it through `stop` alone
        )
        assert self.process.stdout is not None
        name = self.target.removeprefix("test-")
        for line in self.process.stdout:
            text = line.rstrip()
            print(f"{name:12s}| {text}", flush=True)
            if _CLOSING.match(text):
                self.closing = text
            elif text.startswith(("FAILED ", "ERROR ")):
                self.failures.append(text)
        self.status = self.process.wait()
        self.seconds = time.monotonic() - began

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)


def _lane(waiting: deque[Suite]) -> None:
    while waiting:
        try:
            suite = waiting.popleft()
        except IndexError:
            return
        suite.run()


def _summarise(suites: list[Suite]) -> bool:
    """Print the closing line of each suite, the failures, and one total; return whether everything passed."""
    totals: dict[str, int] = {"passed": 0, "failed": 0, "error": 0, "skipped": 0}
    print()
    for suite in suites:
        for count, word in _COUNT.findall(suite.closing):
            totals[word.rstrip("s") if word.startswith("error") else word] += int(count)
        print(f"{suite.target}: exit status {suite.status} after {suite.seconds:.0f} s")
        print(suite.closing or "no closing line of pytest")
    for failure in [failure for suite in suites for failure in suite.failures]:
        print(failure)
    print(
        f"{totals['passed']} passed, {totals['failed'] + totals['error']} failed, {totals['skipped']} skipped"
    )
    return all(suite.status == 0 and suite.closing for suite in suites)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run test suites side by side.")
    parser.add_argument("--lanes", type=int, default=3, help="suites that run at one time")
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    arguments = parser.parse_args()
    suites = [Suite(target) for target in arguments.targets]
    waiting = deque(suites)
    lanes = [threading.Thread(target=_lane, args=(waiting,), daemon=True) for _ in range(arguments.lanes)]
    for lane in lanes:
        lane.start()
    try:
        for lane in lanes:
            lane.join()
    except KeyboardInterrupt:
        waiting.clear()
        for suite in suites:
            suite.stop()
        for lane in lanes:
            lane.join()
        return 130
    return 0 if _summarise(suites) else 1


if __name__ == "__main__":
    sys.exit(main())
