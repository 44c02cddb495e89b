"""What the spool holds, as its writer knows it, and whether that is too much.

The writer alone adds segments, and alone has them deleted. So it looks at the disk when it starts, then adds up; an idle capture lists no
directory however much waits. Now and then it looks again, since someone may have deleted the spool by hand.
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections.abc import Callable

from penstock.position import Position
from penstock.spool import consumers, storage
from penstock.spool.layout import SpoolLayout
from penstock.spool.manifest import Manifest
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import delete_segments

RESUME_AT = 0.9
"""The part of the limit below which a paused capture goes on; so that it does not flutter around the limit."""


DELETE_AT_ONCE = 50
"""Segments. Each takes milliseconds to delete durably, and the writer has other things to do."""


class SpoolStock:
    """The sealed segments, by number and bytes. For the thread of the writer; `look` must be its first call."""

    def __init__(self, reader: SpoolReader, *, look_seconds: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = reader.root
        self._reader = reader
        self._look_seconds = look_seconds
        self._clock = clock
        self._next_look = 0.0
        self._ends: list[int] = []
        self._bytes: dict[int, int] = {}

    def look(self) -> None:
        """Count what is on disk."""
        self._next_look = self._clock() + self._look_seconds
        self._bytes = {segment.end.value: segment.bytes for segment in self._reader.segments()}
        self._ends = sorted(self._bytes)

    def add(self, manifest: Manifest) -> None:
        """Count a segment that was sealed; one captured again counts once."""
        end = manifest.end.value
        if end not in self._bytes:
            insort(self._ends, end)
        self._bytes[end] = manifest.bytes

    def waiting(self, released: Position | None) -> int:
        """How many segments wait for a consumer; all of them if there is none."""
        return len(self._ends) - self._count(released)

    def waiting_bytes(self, released: Position | None) -> int:
        return sum(self._bytes[end] for end in self._ends[self._count(released) :])

    def delete_released(self, released: Position | None) -> None:
        """Delete from the spool what every consumer has released, some of it at a time. Costs nothing while there is nothing to delete.

        The newest segment always stays: it says how far the spool reaches.
        """
        if self._clock() >= self._next_look:
            self.look()
        gone = min(self._count(released), len(self._ends) - 1, DELETE_AT_ONCE)
        if gone > 0:
            delete_segments(SpoolLayout(self.root), [Position.of(end) for end in self._ends[:gone]])
            for end in self._ends[:gone]:
                del self._bytes[end]
            del self._ends[:gone]

    def _count(self, released: Position | None) -> int:
        return 0 if released is None else bisect_right(self._ends, released.value)


class SpoolBudget:
    """Tells the capture to pause while consumers hold on to too much.

    Only what waits for a consumer can become less by waiting. So when no sealed segment waits, the answer is always to go on, even if one
    transaction still open is larger than the limit: it must end before anyone can release it.
    """

    def __init__(
        self, stock: SpoolStock, max_bytes: int, *, interval_seconds: float = 0.5, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stock = stock
        self._max_bytes = max_bytes
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._next_look = clock()
        self._is_paused = False

    def must_pause(self) -> bool:
        """Cheap to ask at every step: the sum is made at most once in `interval_seconds`."""
        if self._clock() >= self._next_look:
            self._next_look = self._clock() + self._interval_seconds
            self._is_paused = self._measure()
        return self._is_paused

    def _measure(self) -> bool:
        held_bytes = self._stock.waiting_bytes(consumers.minimum(self._stock.root))
        used_bytes = held_bytes + storage.size_bytes(SpoolLayout(self._stock.root).open)
        return held_bytes > 0 and used_bytes > self._max_bytes * (RESUME_AT if self._is_paused else 1)
