"""What a process and all that it started have used of the processor. Nothing where there is no /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Self


def tree_cpu_seconds(root: int) -> float:
    """Of a process, of those below it that live, and of those below it that were waited for when they ended."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        used[int(entry.name)] = sum(map(int, fields[11:15]))
        children[int(fields[1])].append(int(entry.name))
    ticks, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        ticks += used.get(process, 0)
        waiting += children[process]
    return ticks / os.sysconf("SC_CLK_TCK")


class TreeCpu:
    """How much that is in a `with` block."""

    def __init__(self, root: int) -> None:
        self.seconds = 0.0
        self._root = root
        self._before = 0.0

    def __enter__(self) -> Self:
        self._before = tree_cpu_seconds(self._root)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds = tree_cpu_seconds(self._root) - self._before
