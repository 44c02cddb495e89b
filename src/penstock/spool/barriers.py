"""Barriers: requests to a running pipeline to end an epoch at a given position.

`verify` holds a snapshot of the source, exact at a position, and compares it with the targets as of that
position. The server names the position only after the snapshot; under load the pipeline would already be past
it. So a barrier has two phases:

- Announced: the position will be later than `after`. Readers end no batch beyond `after`.
- Placed: the `position` is known. A batch that would pass it ends there.

A reader checks for barriers after it has planned a batch. If the reader finds no barrier, the server wrote
everything in the plan before a barrier was announced, so the position of any later barrier is after the plan.
If the reader finds one, it shortens the plan. So no batch passes a barrier, whatever the load.

The owner renews its lease by a counter, the beat. If the beat has not changed for `LEASE_SECONDS` by the
reader's clock, the owner is dead, and the reader deletes the file.
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

from penstock import storage
from penstock.position import Position
from penstock.spool.reader import SpoolReader

LEASE_SECONDS = 15.0
_BEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Barrier:
    """The content of a barrier file."""

    name: str
    after: Position
    position: Position | None = None
    beat: int = 0

    def cut(self, spool: SpoolReader, start: Position, planned: Position) -> Position:
        """Return the position at which a batch from `start`, planned up to `planned`, must end; `start` if
        the batch has to wait.
        """
        if self.position is not None:
            return planned if self.position <= start else min(planned, self.position)
        if planned <= self.after:
            return planned
        # `after` may be any address, even inside a commit record. The ends of segments are positions, so the
        # batch ends at one of them.
        return max(
            (segment.end for segment in spool.segments() if start < segment.end <= self.after), default=start
        )


class BarrierRequest:
    """The owner's side of a barrier: a context manager whose file exists for the length of the block.

    A daemon thread increases the beat.
    """

    def __init__(self, directory: Path, after: Position, *, beat_seconds: float = _BEAT_SECONDS) -> None:
        self._directory = directory
        self._barrier = Barrier(f"{os.getpid()}-{secrets.token_hex(4)}", after)
        self._beat_seconds = beat_seconds
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock-barrier", daemon=True)

    def advance(self, after: Position) -> None:
        """Announce that the position will be later than `after`."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        storage.delete(self._path)

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_seconds):
            with self._lock:
                self._write(replace(self._barrier, beat=self._barrier.beat + 1))

    def _write(self, barrier: Barrier) -> None:
        """Write the file. It is not durable: a machine crash ends the owner too."""
        self._barrier = barrier
        document = {
            "after": str(barrier.after),
            "position": str(barrier.position) if barrier.position is not None else None,
            "beat": barrier.beat,
        }
        storage.put(self._path, json.dumps(document).encode(), durable=False)

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._barrier.name}.json"


class BarrierWatch:
    """The reader's side of barriers. Without barriers a check costs one directory listing."""

    def __init__(
        self,
        directory: Path,
        *,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}

    def cut(self, spool: SpoolReader, start: Position, planned: Position) -> Position:
        """Return the position at which the batch from `start` must end. Call it after `planned` was
        determined, never before.
        """
        for barrier in self.load():
            planned = barrier.cut(spool, start, planned)
        return planned

    def load(self) -> list[Barrier]:
        """Return the barriers whose owners are alive. Deletes the files of the others."""
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
            storage.delete(self._directory / f"{name}.json")
        return [barrier for barrier in found if barrier.name not in dead]


def _load(path: Path) -> Barrier | None:
    """Load a barrier; None if it was just deleted.

    Foreign or damaged files are ignored, so that they cannot stop a pipeline.
    """
    data = storage.read(path) if path.suffix == ".json" else None
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
