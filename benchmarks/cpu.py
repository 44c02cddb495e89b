"""CPU time of a process and its descendants. Zero on systems without /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Self


class TreeCpu:
    """Watches a process and its descendants from the creation of this object, or in a `with` block.

    The system adds the CPU time of an ended process to its parent if the parent waits for it, as Postgres
    does. No process waits for Spark's Python workers, so their CPU time is lost when they end (`forgets`). In
    that case only the processes that still run at the end are counted.
    """

    def __init__(self, root: int, *, forgets: bool = False) -> None:
        self.seconds = 0.0
        self._root = root
        self._forgets = forgets
        self._before = _ticks_by_process(root)

    def __enter__(self) -> Self:
        self._before = _ticks_by_process(self._root)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> float:
        """Store the seconds used so far in `seconds`."""
        after = _ticks_by_process(self._root)
        gone = (
            0
            if self._forgets
            else sum(used for process, used in self._before.items() if process not in after)
        )
        ticks = sum(used - self._before.get(process, 0) for process, used in after.items()) - gone
        self.seconds = ticks / os.sysconf("SC_CLK_TCK")
        return self.seconds


def _ticks_by_process(root: int) -> dict[int, int]:
    """For `root` and its descendants: the CPU time of each, including the children that it waited for."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        used[int(entry.name)] = sum(map(int, fields[11:15]))
        children[int(fields[1])].append(int(entry.name))
    found: dict[int, int] = {}
    waiting = [root]
    while waiting:
        process = waiting.pop()
        found[process] = used.get(process, 0)
        waiting += children[process]
    return found
