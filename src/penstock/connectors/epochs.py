"""Which position each epoch stands for: what makes an acknowledgement possible without `checkpoint` noting anything.

An epoch counts how often the consumer's place has moved. Every move notes its number and the floor that it left; an acknowledged epoch
releases the floor of the last move at or before it. Memory is bounded: when there are too many, every other one is forgotten, and an epoch
that is forgotten releases what the one before it would have.
"""

from __future__ import annotations

from bisect import bisect_right

from penstock.position import Position

_MOST = 4096


class EpochLedger:
    """For one thread at a time."""

    def __init__(self, epoch: int, floor: Position, most: int = _MOST) -> None:
        self._epochs = [epoch]
        self._floors = [floor]
        self._last = epoch
        self._most = most

    @property
    def last(self) -> int:
        """The epoch of now."""
        return self._last

    def move(self, floor: Position) -> None:
        """The consumer's place has moved, and everything up to `floor` has been given out."""
        self._last += 1
        if floor == self._floors[-1]:
            return  # this epoch releases what the one before it does
        if len(self._epochs) >= self._most:
            self._epochs, self._floors = self._epochs[::2], self._floors[::2]
        self._epochs.append(self._last)
        self._floors.append(floor)

    def floor_of(self, epoch: int) -> Position | None:
        """Up to where everything is durable when `epoch` is; None if that is too long ago to say, and so was told before."""
        found = bisect_right(self._epochs, epoch)
        return self._floors[found - 1] if found else None

    def forget_before(self, epoch: int) -> None:
        """Nobody asks any more what earlier epochs stood for."""
        found = bisect_right(self._epochs, epoch) - 1
        if found > 0:
            del self._epochs[:found], self._floors[:found]

    def __len__(self) -> int:
        return len(self._epochs)
