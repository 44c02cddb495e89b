"""The contiguous watermark: which position may be resumed from, given what was delivered and which of it is confirmed.

Changes are numbered as they are delivered. Those confirmed from the first on without a hole are one number, the floor; those confirmed
beyond a hole are kept as runs. So memory goes by the number of holes, whatever the number of changes that wait: for a change that was
delivered nothing is kept but what its own acknowledgement holds. The resume point is where the last transaction ends that lies wholly at
or below the floor.
"""

from __future__ import annotations

import threading
from typing import final

from typing_extensions import override

from penstock.contracts.capture import Ack
from penstock.position import Position


@final
class _Transaction:
    """One commit of which changes have been delivered, and the ground after it where there was nothing.

    `before` is where the ground of the one before it ends, `end` where its own does; `last` is its last change, None while more may come.
    """

    __slots__ = ("before", "end", "last", "position")

    def __init__(self, before: Position, position: Position) -> None:
        self.before = before
        self.position = self.end = position
        self.last: int | None = None


@final
class _Run:
    """Confirmed changes `first` to `last`, and the transaction of the last."""

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
    """`deliver` and `settle` are for the one thread that delivers, in order; everything else is for any thread."""

    def __init__(self, start: Position) -> None:
        # Entered again by its own thread when the garbage collector runs a finalizer that confirms.
        self._lock = threading.RLock()
        self._delivered = 0
        self._current = _Transaction(start, start)
        self._current.last = 0
        self._floor = _Run(1, 0, self._current)
        self._by_first: dict[int, _Run] = {}
        self._by_last: dict[int, _Run] = {}

    def deliver(self, position: Position) -> NumberedAck:
        """Number the next change, which belongs to the commit at `position`."""
        with self._lock:
            if self._current.last is not None or self._current.position != position:
                self._end_transaction()
                self._current = _Transaction(self._current.end, position)
            self._delivered += 1
            return NumberedAck(self, self._delivered, self._current)

    def settle(self, position: Position) -> None:
        """Everything up to `position` has been delivered: the last transaction is whole, and after it there was nothing."""
        with self._lock:
            self._end_transaction()
            self._current.end = max(self._current.end, position)

    def confirm(self, ack: NumberedAck) -> None:
        with self._lock:
            if ack.is_confirmed:
                return
            ack.is_confirmed = True
            if ack.number == self._floor.last + 1 and not self._by_first:  # in order, as almost always
                self._floor.last, self._floor.transaction = ack.number, ack.transaction
                return
            run = self._joined(_Run(ack.number, ack.number, ack.transaction))
            if run.first == self._floor.last + 1:
                self._floor = run
            else:
                self._by_first[run.first] = self._by_last[run.last] = run

    @property
    def resume(self) -> Position:
        """Everything at or before here is confirmed. It never goes back."""
        with self._lock:
            reached = self._floor.transaction
            return reached.end if reached.last == self._floor.last else reached.before

    @property
    def runs(self) -> int:
        """How many runs are confirmed beyond a hole: what the memory goes by."""
        with self._lock:
            return len(self._by_first)

    def _end_transaction(self) -> None:
        if self._current.last is None:
            self._current.last = self._delivered

    def _joined(self, run: _Run) -> _Run:
        """With the runs that it touches on both sides, which are taken out."""
        left = self._by_last.pop(run.first - 1, None)
        if left is not None:
            del self._by_first[left.first]
            run.first = left.first
        right = self._by_first.pop(run.last + 1, None)
        if right is not None:
            del self._by_last[right.last]
            run.last, run.transaction = right.last, right.transaction
        return run
