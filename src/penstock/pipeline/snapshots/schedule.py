"""Which step of which table comes next, for several threads that copy several tables under one exported snapshot.

A table is opened, its chunks are read, keys that changed between fences are read again if there is more than one fence, and it is
committed. All but the last need the snapshot. Steps that end a table come first; of the others, those of the smallest and of the largest
table take turns: small tables do not wait behind a huge one, nor does a huge one wait until thousands of small ones are done.

Nothing here does any work or knows what a table is, so it can be tried without any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.2


class Step(Enum):
    OPEN = "open"
    CHUNK = "chunk"
    REREAD = "reread"
    COMMIT = "commit"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Lot(Generic[T]):
    """One table on its way. Only the schedule changes it."""

    table: T
    heap_bytes: int
    """Still to be read; before the table is opened, by estimate."""
    stage: Step = Step.OPEN
    waiting: dict[int, int] = field(default_factory=dict)
    """Chunks that nobody reads yet: number → bytes, in order."""
    busy: int = 0
    """Steps that are being done."""
    not_before: float = 0.0
    is_blocked: bool = False
    """A step was put back: until one succeeds, one at a time is tried, so that others do not wait along."""

    @property
    def is_ready(self) -> bool:
        if self.stage is Step.CHUNK:
            return bool(self.waiting) and not (self.is_blocked and self.busy)
        return self.stage is not Step.DONE and self.busy == 0


@dataclass(frozen=True, slots=True)
class Turn(Generic[T]):
    """A step to be done, by whoever took it."""

    lot: Lot[T]
    step: Step
    chunk: int = -1


class Schedule(Generic[T]):
    """One round, under one snapshot. Threads `take` turns and say what became of each."""

    def __init__(
        self,
        tables: Iterable[tuple[T, int]],
        *,
        is_stopping: Callable[[], bool] = lambda: False,
        hold_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lots = [Lot(table, heap_bytes) for table, heap_bytes in tables]
        self._is_stopping = is_stopping
        self._clock = clock
        self._deadline = None if hold_seconds is None else clock() + hold_seconds
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_given_up = False
        self._smallest_next = True
        self.chunks_read = 0

    @property
    def unfinished(self) -> list[T]:
        return [lot.table for lot in self.lots if lot.stage is not Step.DONE]

    @property
    def is_expired(self) -> bool:
        """Whether the snapshot has been held for long enough. A round always gets one chunk further."""
        return self._deadline is not None and self.chunks_read > 0 and self._clock() >= self._deadline

    def take(self) -> Turn[T] | None:
        """The next step; waits while there is none yet. None when there will be none in this round."""
        with self._changed:
            while True:
                turn = self._next()
                if turn is not None:
                    self._start(turn)
                    return turn
                if not any(lot.busy for lot in self.lots) and not self._is_waiting():
                    self._changed.notify_all()
                    return None
                self._changed.wait(_POLL_SECONDS)

    def opened(self, turn: Turn[T], chunks: Sequence[tuple[int, int]], *, then: Step) -> None:
        """The table is planned: chunks by number, with their bytes; `then` is what comes if there are none."""
        with self._ending(turn) as lot:
            lot.waiting = dict(chunks)
            lot.heap_bytes = sum(lot.waiting.values())
            lot.stage = Step.CHUNK if chunks else then

    def read(self, turn: Turn[T], heap_bytes: int, *, then: Step) -> None:
        """A chunk is in; `then` is what comes if it was the last."""
        with self._ending(turn) as lot:
            self.chunks_read += 1
            lot.is_blocked = False
            lot.heap_bytes -= heap_bytes
            if lot.stage is Step.CHUNK and not lot.waiting and not lot.busy:
                lot.stage = then

    def advance(self, turn: Turn[T], then: Step) -> None:
        """The step is done, and this one follows."""
        with self._ending(turn) as lot:
            lot.stage = then

    def put_back(self, turn: Turn[T], heap_bytes: int = 0, *, pause_seconds: float = 0.0) -> None:
        """The step was not done. Somebody takes it again after the pause, in this round if there is time, or in the next."""
        with self._ending(turn) as lot:
            if turn.step is Step.CHUNK and lot.stage is Step.CHUNK:
                lot.waiting[turn.chunk] = heap_bytes
            lot.not_before = self._clock() + pause_seconds
            lot.is_blocked = True

    def drop(self, turn: Turn[T]) -> None:
        """Nothing more of this table, at least in this round."""
        with self._ending(turn) as lot:
            lot.stage, lot.waiting = Step.DONE, {}

    def close(self) -> None:
        """The snapshot is lost: what does not need it is still done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """All of it is worthless by now: nothing more is done."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def await_release(self, timeout_seconds: float) -> bool:
        """Wait until nobody needs the snapshot any more; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._needs_snapshot(), timeout_seconds)

    def _needs_snapshot(self) -> bool:
        needing = [lot for lot in self.lots if lot.stage not in (Step.COMMIT, Step.DONE)]
        return any(lot.busy for lot in needing) or any(self._is_allowed(lot) for lot in needing if lot.is_ready)

    def _is_allowed(self, lot: Lot[T]) -> bool:
        if self._is_given_up:
            return False
        if lot.stage is Step.COMMIT:
            return True
        if self._is_closed or self._is_stopping():
            return False
        return lot.stage is Step.REREAD or not self.is_expired

    def _is_waiting(self) -> bool:
        """Whether a step is only being held off for a while."""
        return any(lot.is_ready and self._is_allowed(lot) for lot in self.lots)

    def _next(self) -> Turn[T] | None:
        now = self._clock()
        ready = [lot for lot in self.lots if lot.is_ready and lot.not_before <= now and self._is_allowed(lot)]
        for step in (Step.COMMIT, Step.REREAD):
            for lot in ready:
                if lot.stage is step:
                    return Turn(lot, step)
        if not ready:
            return None
        lot = (min if self._smallest_next else max)(ready, key=lambda each: each.heap_bytes)
        self._smallest_next = not self._smallest_next
        return Turn(lot, lot.stage, next(iter(lot.waiting), -1))

    def _start(self, turn: Turn[T]) -> None:
        turn.lot.busy += 1
        turn.lot.waiting.pop(turn.chunk, None)

    def _ending(self, turn: Turn[T]) -> _Ending[T]:
        return _Ending(self._changed, turn.lot)


class _Ending(Generic[T]):
    """A step ends: the lot is changed, then everybody looks again."""

    def __init__(self, changed: threading.Condition, lot: Lot[T]) -> None:
        self._changed = changed
        self._lot = lot

    def __enter__(self) -> Lot[T]:
        self._changed.acquire()
        self._lot.busy -= 1
        return self._lot

    def __exit__(self, *_: object) -> None:
        self._changed.notify_all()
        self._changed.release()
