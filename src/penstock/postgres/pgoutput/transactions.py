"""Begin and Commit, all at once: which transaction each message belongs to, and when and where that committed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from penstock.position import Position
from penstock.postgres.pgoutput.framing import BEGIN, COMMIT, HEADER_BYTES, KEEPALIVE, MESSAGE, BoolArray, Frames, IntArray

_BEGIN_BYTES = HEADER_BYTES + 21
_COMMIT_BYTES = HEADER_BYTES + 26
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_POSTGRES_EPOCH = (datetime(2000, 1, 1, tzinfo=UTC) - _UNIX_EPOCH) // timedelta(microseconds=1)
_FIRST_TIME = (datetime(1, 1, 1, tzinfo=UTC) - _UNIX_EPOCH) // timedelta(microseconds=1)
_LAST_TIME = (datetime(9999, 12, 31, tzinfo=UTC) - _UNIX_EPOCH) // timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction whose beginning has been given out in pieces; its next change has the number `ordinal`."""

    xid: int
    ordinal: int


@dataclass(frozen=True, slots=True, eq=False)
class Commits:
    """One entry for each Commit message: end positions, and times in microseconds since 1970."""

    positions: IntArray
    times: IntArray

    def __len__(self) -> int:
        return len(self.positions)

    def position(self, at: int) -> Position:
        return Position.of(int(self.positions[at]))

    def time(self, at: int) -> datetime:
        return _UNIX_EPOCH + timedelta(microseconds=int(self.times[at]))


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The transactions of a run of messages. `begins` holds the index of each Begin, or -1 for one that began before the run."""

    begins: IntArray
    xids: IntArray
    commits: Commits | None
    """None for a run inside one transaction that is still open."""
    first_ordinal: int = 0

    def of(self, messages: IntArray) -> IntArray:
        """Which transaction each message belongs to."""
        return np.searchsorted(self.begins, messages, side="right") - 1


def check_order(frames: Frames, is_open: bool) -> BoolArray:
    """Hold the messages to their grammar, and tell for each whether a transaction is open after it."""
    begins = frames.kinds == BEGIN
    commits = frames.kinds == COMMIT
    depth = np.cumsum(begins.view(np.int8) - commits.view(np.int8), dtype=np.int64) + int(is_open)
    # Begin must find nothing open, and everything but a logical message or a keepalive must stand in a transaction.
    free = (frames.kinds == KEEPALIVE) | (frames.kinds == MESSAGE)
    right = np.where(commits, depth == 0, (depth == 1) | (free & (depth == 0)))
    frames.require(right, np.arange(len(frames)), "stands in the wrong place among Begin and Commit")
    open_after: BoolArray = depth == 1
    return open_after


def decode_begins(frames: Frames) -> tuple[IntArray, IntArray]:
    """The indices of the Begin messages, and their xids."""
    begins = frames.where(BEGIN)
    starts = frames.starts[begins]
    frames.require(frames.ends[begins] - starts == _BEGIN_BYTES, begins, "has the wrong length")
    return begins, frames.u32(starts + HEADER_BYTES + 17)


def decode_commits(frames: Frames, last: Position) -> Commits:
    """Every Commit message; their positions must go forward from `last`."""
    commits = frames.where(COMMIT)
    starts = frames.starts[commits]
    frames.require(frames.ends[commits] - starts == _COMMIT_BYTES, commits, "has the wrong length")
    positions = frames.i64(starts + HEADER_BYTES + 10)
    # Compared, not subtracted: a damaged position may be so far off that the difference overflows.
    frames.require(positions > np.concatenate([[last.value], positions[:-1]]), commits, "does not move the position forward")
    times = frames.i64(starts + HEADER_BYTES + 18)
    # The bounds are shifted rather than the values, which could overflow.
    sane = (times >= _FIRST_TIME - _POSTGRES_EPOCH) & (times <= _LAST_TIME - _POSTGRES_EPOCH)
    frames.require(sane, commits, "has an impossible time")
    return Commits(positions, times + _POSTGRES_EPOCH)
