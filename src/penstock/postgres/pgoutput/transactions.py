"""Begin and Commit, all at once: which transaction each message belongs to, and when and where that committed.

A transaction stands in one run from its Begin to its Commit, or, while it is still open, in blocks from a Stream Start to a Stream Stop,
until a Stream Commit or a Stream Abort outside of any block. Neither ever stands inside another.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from penstock.position import Position
from penstock.postgres.pgoutput.framing import (
    BEGIN,
    COMMIT,
    DELETE,
    HEADER_BYTES,
    INSERT,
    KEEPALIVE,
    MESSAGE,
    ORIGIN,
    RELATION,
    STREAM_ABORT,
    STREAM_COMMIT,
    STREAM_START,
    STREAM_STOP,
    TRUNCATE,
    TYPE,
    UPDATE,
    ByteArray,
    Frames,
    IntArray,
)

BETWEEN, IN_TRANSACTION, IN_BLOCK = range(3)
"""Where the log is after a message: between transactions, in a whole one, or in a block of an open one."""

_STEP = np.zeros(256, np.int8)
_STEP[[BEGIN, COMMIT, STREAM_START, STREAM_STOP]] = [IN_TRANSACTION, -IN_TRANSACTION, IN_BLOCK, -IN_BLOCK]
_MAY_FOLLOW = np.zeros(256, np.uint8)
"""For each kind, the places in which it may stand, as bits."""
_MAY_FOLLOW[[BEGIN, STREAM_START, STREAM_COMMIT, STREAM_ABORT]] = 1 << BETWEEN
_MAY_FOLLOW[COMMIT] = 1 << IN_TRANSACTION
_MAY_FOLLOW[STREAM_STOP] = 1 << IN_BLOCK
_MAY_FOLLOW[[ORIGIN, RELATION, TYPE, INSERT, UPDATE, DELETE, TRUNCATE]] = 1 << IN_TRANSACTION | 1 << IN_BLOCK
_MAY_FOLLOW[[MESSAGE, KEEPALIVE]] = 1 << BETWEEN | 1 << IN_TRANSACTION | 1 << IN_BLOCK

_CHANGES = np.zeros(256, np.bool_)
_CHANGES[[INSERT, UPDATE, DELETE, TRUNCATE]] = True

_BEGIN_BYTES = HEADER_BYTES + 21
_COMMIT_BYTES = 25
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

    @classmethod
    def inside(cls, transaction: OpenTransaction) -> Timeline:
        """Of messages that all belong to one transaction, which began before them and has not ended."""
        return cls(np.array([-1]), np.array([transaction.xid]), None, transaction.ordinal)

    def place_at(self, frames: Frames, message: int) -> int:
        """A place that all changes from this message on have in the log, or one before it.

        For whole transactions it is where they commit: whatever a transaction changed, it did after all that committed before it and
        had a lock in its way. One that is open has only the places of its changes.
        """
        if self.commits is not None:
            return int(self.commits.positions[np.searchsorted(self.begins, message, side="right") - 1])
        lsns = _change_lsns(frames[message:])[1]
        return int(lsns[0]) if len(lsns) else 0

    def first_past(self, frames: Frames, place: int) -> int | None:
        """The message from which on all changes have a place after this one."""
        messages, places = (self.begins, self.commits.positions) if self.commits is not None else _change_lsns(frames)
        at = int(np.searchsorted(places, place, side="right"))
        return int(messages[at]) if at < len(messages) else None

    def of(self, messages: IntArray) -> IntArray:
        """Which transaction each message belongs to."""
        return np.searchsorted(self.begins, messages, side="right") - 1


def _change_lsns(frames: Frames) -> tuple[IntArray, IntArray]:
    """The changes, which a transaction has in the order of the log, and their LSNs. The server gives none with what it puts before them."""
    changes = np.flatnonzero(_CHANGES[frames.kinds])
    return changes, frames.i64(frames.starts[changes] + 1)


def check_order(frames: Frames, place: int) -> ByteArray:
    """Hold the messages, before which the log is at `place`, to their grammar; tells for each where the log is after it."""
    steps = _STEP[frames.kinds]
    after = (np.cumsum(steps, dtype=np.int64) + place).astype(np.uint8)
    # Only the first that is out of place counts; what is computed after it means nothing, and a shift too far gives 0.
    before = after - steps.view(np.uint8)
    right = (_MAY_FOLLOW[frames.kinds] >> before) & 1
    frames.require(right.view(np.bool_), np.arange(len(frames)), "stands in the wrong place among Begin, Commit and blocks")
    return after


def decode_begins(frames: Frames) -> tuple[IntArray, IntArray]:
    """The indices of the Begin messages, and their xids."""
    begins = frames.where(BEGIN)
    starts = frames.starts[begins]
    frames.require(frames.ends[begins] - starts == _BEGIN_BYTES, begins, "has the wrong length")
    return begins, frames.u32(starts + HEADER_BYTES + 17)


def decode_commits(frames: Frames, last: Position, kind: int = COMMIT) -> Commits:
    """Every Commit message; their positions must go forward from `last`."""
    commits = frames.where(kind)
    fields = frames.starts[commits] + frames.fields_at
    frames.require(frames.ends[commits] - fields == _COMMIT_BYTES, commits, "has the wrong length")
    positions = frames.i64(fields + 9)
    # Compared, not subtracted: a damaged position may be so far off that the difference overflows.
    frames.require(positions > np.concatenate([[last.value], positions[:-1]]), commits, "does not move the position forward")
    times = frames.i64(fields + 17)
    # The bounds are shifted rather than the values, which could overflow.
    sane = (times >= _FIRST_TIME - _POSTGRES_EPOCH) & (times <= _LAST_TIME - _POSTGRES_EPOCH)
    frames.require(sane, commits, "has an impossible time")
    return Commits(positions, times + _POSTGRES_EPOCH)


def decode_stream_commit(frames: Frames, index: int, last: Position) -> tuple[int, Commits]:
    """The xid of the transaction, and its commit: the fields of a Commit, after the xid."""
    message = frames[index : index + 1].in_block()
    commits = decode_commits(message, last, STREAM_COMMIT)
    return int(message.xids(np.array([0]))[0]), commits
