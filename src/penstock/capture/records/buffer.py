"""The buffer between the thread that follows the changes and the caller who reads one."""

from __future__ import annotations

import threading
from collections import deque

from typing_extensions import override

from penstock.contracts.records import CdcIterator, Record
from penstock.errors import NoRowsError

_CAPACITY = 256


class RecordBuffer(CdcIterator):
    """Holds a few records, and the error behind them if there is one."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._records: deque[Record] = deque()
        self._failure: BaseException | None = None
        self._is_closed = False

    @override
    def has_next(self) -> bool:
        with self._changed:
            return bool(self._records)

    @override
    def next(self) -> Record:
        with self._changed:
            self._changed.wait_for(self._has_answer)
            if self._records:
                self._changed.notify_all()
                return self._records.popleft()
            if self._failure is not None:
                raise self._failure
            raise _closed()

    @override
    def push(self, record: Record) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._records) < self._capacity)
            if self._is_closed:
                raise _closed()
            self._records.append(record)
            self._changed.notify_all()

    @override
    def teardown(self) -> None:
        with self._changed:
            self._is_closed = True
            self._records.clear()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing more will be pushed; once the buffer is empty, `next` raises this."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait, at most so long, until `next` would not."""
        with self._changed:
            return self._changed.wait_for(self._has_answer, timeout_seconds)

    def _has_answer(self) -> bool:
        return bool(self._records) or self._failure is not None or self._is_closed


def _closed() -> NoRowsError:
    return NoRowsError("what was read from is closed", hint="open a new one, and go on from the last position")
