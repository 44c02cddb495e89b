"""The work queue of the threads that copy tables under one exported snapshot.

The steps of a table are: open the table, read its chunks, read changed rows again if the chunks have
different fences, commit. All steps except the commit need the exported snapshot. Threads take commits first,
then the reading of changed rows. They take the other steps alternately from the smallest and from the largest
table, so that neither small tables nor a huge one starve.

This module does no I/O and does not use the table objects, so it can be tested alone.
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
class TableQueue(Generic[T]):
    """The steps of one table. Only `Schedule` modifies it."""

    table: T
    heap_bytes: int
    """Heap bytes that are still to be read. An estimate until the table is opened."""
    stage: Step = Step.OPEN
    waiting: dict[int, int] = field(default_factory=dict)
    """Chunks that no thread has taken yet: heap bytes by chunk number, in the order of reading."""
    busy: int = 0
    """Number of the table's steps in progress."""
    not_before: float = 0.0
    is_blocked: bool = False
    """Whether a step failed and was put back. Until a chunk is then read successfully, threads read only one
    chunk of the table at a time.
    """

    @property
    def is_ready(self) -> bool:
        if self.stage is Step.CHUNK:
            return bool(self.waiting) and not (self.is_blocked and self.busy)
        return self.stage is not Step.DONE and self.busy == 0


@dataclass(frozen=True, slots=True)
class WorkItem(Generic[T]):
    """A step that a thread has taken."""

    queue: TableQueue[T]
    step: Step
    chunk: int = -1
    """The number of the chunk; -1 if the step is not a chunk."""


class Schedule(Generic[T]):
    """The steps of one round, under one exported snapshot. Threads `take` steps, and report the result of
    each step.
    """

    def __init__(
        self,
        tables: Iterable[tuple[T, int]],
        *,
        is_stopping: Callable[[], bool] = lambda: False,
        hold_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queues = [TableQueue(table, heap_bytes) for table, heap_bytes in tables]
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
        return [queue.table for queue in self.queues if queue.stage is not Step.DONE]

    @property
    def is_expired(self) -> bool:
        """Whether the snapshot was held for `hold_seconds`, and at least one chunk was read under it."""
        return self._deadline is not None and self.chunks_read > 0 and self._clock() >= self._deadline

    def take(self) -> WorkItem[T] | None:
        """Wait for the next step that can start, and return it. Returns None if the round has no more
        steps.
        """
        with self._changed:
            while True:
                item = self._next()
                if item is not None:
                    self._start(item)
                    return item
                if not any(queue.busy for queue in self.queues) and not self._is_waiting():
                    self._changed.notify_all()
                    return None
                self._changed.wait(_POLL_SECONDS)

    def opened(self, item: WorkItem[T], chunks: Sequence[tuple[int, int]], *, then: Step) -> None:
        """Report the table as opened. `chunks`: number and heap bytes of each missing chunk. If no chunk is
        missing, the table's next step is `then`.
        """
        with self._ending(item) as queue:
            queue.waiting = dict(chunks)
            queue.heap_bytes = sum(queue.waiting.values())
            queue.stage = Step.CHUNK if chunks else then

    def read(self, item: WorkItem[T], heap_bytes: int, *, then: Step) -> None:
        """Report a chunk as read. After the last chunk, the table's next step is `then`."""
        with self._ending(item) as queue:
            self.chunks_read += 1
            queue.is_blocked = False
            queue.heap_bytes -= heap_bytes
            if queue.stage is Step.CHUNK and not queue.waiting and not queue.busy:
                queue.stage = then

    def advance(self, item: WorkItem[T], then: Step) -> None:
        """Report the step as done. The table's next step is `then`."""
        with self._ending(item) as queue:
            queue.stage = then

    def put_back(self, item: WorkItem[T], heap_bytes: int = 0, *, pause_seconds: float = 0.0) -> None:
        """Report the step as failed. It is retried after the pause: in this round if the snapshot is still
        held, otherwise in the next round.
        """
        with self._ending(item) as queue:
            if item.step is Step.CHUNK and queue.stage is Step.CHUNK:
                queue.waiting[item.chunk] = heap_bytes
            queue.not_before = self._clock() + pause_seconds
            queue.is_blocked = True

    def drop(self, item: WorkItem[T]) -> None:
        """Remove the table from this round."""
        with self._ending(item) as queue:
            queue.stage, queue.waiting = Step.DONE, {}

    def close(self) -> None:
        """Start no more steps that need the snapshot, because it is lost or the round failed. Commits still
        start.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """Start no more steps, not even commits."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def await_release(self, timeout_seconds: float) -> bool:
        """Wait until no step needs the snapshot any more. Returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._needs_snapshot(), timeout_seconds)

    def _needs_snapshot(self) -> bool:
        needing = [queue for queue in self.queues if queue.stage not in (Step.COMMIT, Step.DONE)]
        return any(queue.busy for queue in needing) or any(
            self._is_allowed(queue) for queue in needing if queue.is_ready
        )

    def _is_allowed(self, queue: TableQueue[T]) -> bool:
        if self._is_given_up:
            return False
        if queue.stage is Step.COMMIT:
            return True
        if self._is_closed or self._is_stopping():
            return False
        return queue.stage is Step.REREAD or not self.is_expired

    def _is_waiting(self) -> bool:
        """Whether a step will be able to start when its pause has ended."""
        return any(queue.is_ready and self._is_allowed(queue) for queue in self.queues)

    def _next(self) -> WorkItem[T] | None:
        now = self._clock()
        ready = [
            queue
            for queue in self.queues
            if queue.is_ready and queue.not_before <= now and self._is_allowed(queue)
        ]
        for step in (Step.COMMIT, Step.REREAD):
            for queue in ready:
                if queue.stage is step:
                    return WorkItem(queue, step)
        if not ready:
            return None
        queue = (min if self._smallest_next else max)(ready, key=lambda each: each.heap_bytes)
        self._smallest_next = not self._smallest_next
        return WorkItem(queue, queue.stage, next(iter(queue.waiting), -1))

    def _start(self, item: WorkItem[T]) -> None:
        item.queue.busy += 1
        item.queue.waiting.pop(item.chunk, None)

    def _ending(self, item: WorkItem[T]) -> _Ending[T]:
        return _Ending(self._changed, item.queue)


class _Ending(Generic[T]):
    """Context manager that locks the queue of a table whose step has ended. The caller updates the queue in
    the block. At its end, the waiting threads are notified.
    """

    def __init__(self, changed: threading.Condition, queue: TableQueue[T]) -> None:
        self._changed = changed
        self._queue = queue

    def __enter__(self) -> TableQueue[T]:
        self._changed.acquire()
        self._queue.busy -= 1
        return self._queue

    def __exit__(self, *_: object) -> None:
        self._changed.notify_all()
        self._changed.release()
