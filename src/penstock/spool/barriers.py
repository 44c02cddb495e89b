"""Barriers: places in the log at which a pipeline is asked to end an epoch.

Somebody who holds a snapshot of the source, exact at a position, wants the targets as of that very position. The position comes from the
server, and under load a pipeline would long be past it when it hears of it. So a barrier is first announced, then placed:

- Announced, it says that the place will come later than `after`. Readers end no batch beyond that.
- Placed, it has its `position`. A batch that would reach past it ends there.

A reader looks for barriers after it has planned a batch. If it sees none, the server had already written everything in the plan when the
barrier was announced, and the place, which the server names only after that, lies behind the plan. If it sees one, it cuts the plan. So no
batch ever steps over a barrier, whatever the load. What keeps a barrier from holding up a reader for longer than its owner lives is a
beat: a number that goes up. When it has not for `LEASE_SECONDS`, by the reader's own clock, the owner is dead, and the file is removed.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.position import Position
from penstock.spool import storage
from penstock.spool.reader import SpoolReader

LEASE_SECONDS = 15.0
_BEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Barrier:
    """What its file says."""

    name: str
    after: Position
    position: Position | None = None
    beat: int = 0

    def cut(self, spool: SpoolReader, start: Position, planned: Position) -> Position:
        """Where a batch from `start`, planned up to `planned`, may end; `start` if it has to wait."""
        if self.position is not None:
            return planned if self.position <= start else min(planned, self.position)
        if planned <= self.after:
            return planned
        # `after` itself may lie anywhere, also inside a commit record. Ends of segments do not.
        return max((segment.end for segment in spool.segments() if start < segment.end <= self.after), default=start)


class BarrierRequest:
    """A barrier as its owner has it: a context manager, with a file that is there as long. It beats by itself."""

    def __init__(self, directory: Path, after: Position, *, beat_seconds: float = _BEAT_SECONDS) -> None:
        self._directory = directory
        self._barrier = Barrier(f"{os.getpid()}-{secrets.token_hex(4)}", after)
        self._beat_seconds = beat_seconds
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="penstock-barrier", daemon=True)

    def advance(self, after: Position) -> None:
        """The place is still not known, and will come later than `after`."""
        with self._lock:
            self._write(replace(self._barrier, after=max(after, self._barrier.after)))

    def place(self, position: Position) -> None:
        with self._lock:
            self._write(replace(self._barrier, position=position))

    def __enter__(self) -> Self:
        with self._lock:
            self._write(self._barrier)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        storage.remove_file(self._path)

    def _keep_beating(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            with self._lock:
                self._write(replace(self._barrier, beat=self._barrier.beat + 1))

    def _write(self, barrier: Barrier) -> None:
        """Not durable: a barrier means nothing once its owner is gone, and a crash of the machine takes both."""
        self._barrier = barrier
        document = {
            "after": str(barrier.after),
            "position": str(barrier.position) if barrier.position is not None else None,
            "beat": barrier.beat,
        }
        storage.replace_bytes(self._path, json.dumps(document).encode(), durable=False)

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._barrier.name}.json"


class BarrierWatch:
    """The barriers in a directory, as a reader of the spool sees them. Costs one directory listing when there are none."""

    def __init__(self, directory: Path, *, lease_seconds: float = LEASE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}

    def cut(self, spool: SpoolReader, start: Position, planned: Position) -> Position:
        """Where the batch from `start` may end. To be asked after `planned` was found, never before."""
        for barrier in self.look():
            planned = barrier.cut(spool, start, planned)
        return planned

    def look(self) -> list[Barrier]:
        """Those whose owners live."""
        loaded = [_load(self._directory / file_name) for file_name in storage.list_files(self._directory)]
        found = [barrier for barrier in loaded if barrier is not None]
        now = self._clock()
        before = self._seen
        self._seen = {}
        for barrier in found:
            beat, since = before.get(barrier.name, (-1, now))
            self._seen[barrier.name] = (barrier.beat, since if beat == barrier.beat else now)
        dead = [name for name, (_, since) in self._seen.items() if now - since > self._lease_seconds]
        for name in dead:
            storage.remove_file(self._directory / f"{name}.json")
        return [barrier for barrier in found if barrier.name not in dead]


def _load(path: Path) -> Barrier | None:
    """None for one that has just been taken away, and for whatever else lies there: it must not stop a pipeline."""
    data = storage.read_bytes(path) if path.suffix == ".json" else None
    try:
        document = json.loads(data or b"null")
        position = document["position"]
        return Barrier(
            path.stem,
            Position.parse(document["after"]),
            Position.parse(position) if position is not None else None,
            int(document["beat"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
