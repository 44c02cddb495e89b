"""Acknowledgements: determine the position up to which everything has been acknowledged.

`AckWatermark` accepts an acknowledgement for each change, in any order. It numbers changes as they are
delivered. Changes that are confirmed without a gap from the first one are represented by one number, the
floor; changes confirmed beyond a gap are kept as runs. So memory grows with the number of gaps, not with the
number of changes: a delivered change costs only its own acknowledgement object.

`CumulativeAcks` is for readers that acknowledge a key, such as an epoch or an offset in a stream, and so
acknowledge everything up to that key.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, Generic, TypeVar, final

from typing_extensions import override

from penstock.contracts.capture import Ack
from penstock.position import Position

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison

Key = TypeVar("Key", bound="SupportsRichComparison")
Value = TypeVar("Value")


@final
class _Transaction:
    """A commit of which at least one change has been delivered.

    `before` is the position to resume from while the transaction is unconfirmed, `end` the one after it is
    confirmed. `end` is later than the commit if no other change commits up to there. `last` is the number of
    its last change, or None while more changes may follow.
    """

    __slots__ = ("before", "end", "last", "position")

    def __init__(self, before: Position, position: Position) -> None:
        self.before = before
        self.position = self.end = position
        self.last: int | None = None


@final
class _Run:
    """Confirmed changes with the numbers `first` to `last`, and the transaction of the last one."""

    __slots__ = ("first", "last", "transaction")

    def __init__(self, first: int, last: int, transaction: _Transaction) -> None:
        self.first = first
        self.last = last
        self.transaction = transaction


@final
class NumberedAck(Ack):
    """The acknowledgement of one delivered change."""

    __slots__ = ("_watermark", "is_confirmed", "number", "transaction")

    def __init__(self, watermark: AckWatermark, number: int, transaction: _Transaction) -> None:
        self._watermark = watermark
        self.number = number
        self.transaction = transaction
        self.is_confirmed = False

    @override
    def confirm(self) -> None:
        self._watermark.confirm(self)


class AckWatermark:
    """Determines the end of the last transaction up to which every change is confirmed.

    One thread calls `deliver` and `settle`, in stream order. Any thread may call the other methods.
    """

    def __init__(self, start: Position) -> None:
        # Reentrant: the garbage collector may run a finalizer that confirms while this thread holds the lock.
        self._lock = threading.RLock()
        self._delivered = 0
        self._current = _Transaction(start, start)
        self._current.last = 0
        self._floor = _Run(1, 0, self._current)
        self._by_first: dict[int, _Run] = {}
        self._by_last: dict[int, _Run] = {}

    def deliver(self, position: Position) -> NumberedAck:
        """Number the next change, which belongs to the commit at `position`; returns its acknowledgement."""
        with self._lock:
            if self._current.last is not None or self._current.position != position:
                self._end_transaction()
                self._current = _Transaction(self._current.end, position)
            self._delivered += 1
            return NumberedAck(self, self._delivered, self._current)

    def settle(self, position: Position) -> None:
        """Mark everything up to `position` as delivered: the last transaction is complete, and no further
        change commits at or before `position`.
        """
        with self._lock:
            self._end_transaction()
            self._current.end = max(self._current.end, position)

    def confirm(self, ack: NumberedAck) -> None:
        with self._lock:
            if ack.is_confirmed:
                return
            ack.is_confirmed = True
            if (
                ack.number == self._floor.last + 1 and not self._by_first
            ):  # the usual case: confirmed in order
                self._floor.last, self._floor.transaction = ack.number, ack.transaction
                return
            run = self._merge_neighbours(_Run(ack.number, ack.number, ack.transaction))
            if run.first == self._floor.last + 1:
                self._floor = run
            else:
                self._by_first[run.first] = self._by_last[run.last] = run

    @property
    def resume(self) -> Position:
        """The position up to which everything is confirmed. It never decreases."""
        with self._lock:
            transaction = self._floor.transaction
            return transaction.end if transaction.last == self._floor.last else transaction.before

    @property
    def runs(self) -> int:
        """The number of runs of changes that are confirmed beyond a gap. Memory grows with this number."""
        with self._lock:
            return len(self._by_first)

    def _end_transaction(self) -> None:
        if self._current.last is None:
            self._current.last = self._delivered

    def _merge_neighbours(self, run: _Run) -> _Run:
        """Merge the run that ends right before `run`, and the run that begins right after it, into `run`."""
        left = self._by_last.pop(run.first - 1, None)
        if left is not None:
            del self._by_first[left.first]
            run.first = left.first
        right = self._by_first.pop(run.last + 1, None)
        if right is not None:
            del self._by_last[right.last]
            run.last, run.transaction = right.last, right.transaction
        return run


class CumulativeAcks(Generic[Key, Value]):
    """Keys in ascending order, each with the value that is reached when the key is acknowledged. Used by one
    thread at a time. Acknowledging a key acknowledges all smaller ones. With `limit`, memory is bounded: when
    there are that many entries, every second one is dropped. Acknowledging the key of a dropped entry reaches
    only the value of the entry before it.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._keys: list[Key] = []
        self._values: list[Value] = []

    def append(self, key: Key, value: Value) -> None:
        """Add an entry. `key` must be greater than that of the last entry."""
        if self._limit is not None and len(self._keys) >= self._limit:
            self._keys, self._values = self._keys[::2], self._values[::2]
        self._keys.append(key)
        self._values.append(value)

    @property
    def last(self) -> tuple[Key, Value] | None:
        return (self._keys[-1], self._values[-1]) if self._keys else None

    def remove_last(self) -> Value:
        self._keys.pop()
        return self._values.pop()

    def reached_by(self, key: Key) -> Value | None:
        """Return the value of the greatest key up to `key`; None if there is no such entry, or if it was
        removed.
        """
        found = bisect_right(self._keys, key)
        return self._values[found - 1] if found else None

    def take(self, key: Key) -> list[Value]:
        """Remove the entries up to `key`, and return their values in order."""
        found = bisect_right(self._keys, key)
        taken = self._values[:found]
        if found:
            del self._keys[:found], self._values[:found]
        return taken

    def forget_before(self, key: Key) -> None:
        """Remove the entries that `reached_by` does not need for `key` and greater keys."""
        found = bisect_right(self._keys, key) - 1
        if found > 0:
            del self._keys[:found], self._values[:found]

    def clear(self) -> None:
        self._keys.clear()
        self._values.clear()

    def __len__(self) -> int:
        return len(self._keys)
