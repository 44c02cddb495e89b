"""Decode all Begin and Commit messages at once: the transaction of each message, and its commit position and
time.

A transaction is sent as one run from Begin to Commit. A transaction that is still open may also be sent in
blocks from Stream Start to Stream Stop, followed by a Stream Commit or a Stream Abort outside of any block.
Runs and blocks are never nested.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from penstock.position import Position
from penstock.postgres.pgoutput.messages import (
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
"""The states of the log after a message: between transactions, in a whole transaction, or in a block of an
open transaction.
"""

_STEP = np.zeros(256, np.int8)
_STEP[[BEGIN, COMMIT, STREAM_START, STREAM_STOP]] = [IN_TRANSACTION, -IN_TRANSACTION, IN_BLOCK, -IN_BLOCK]
_MAY_FOLLOW = np.zeros(256, np.uint8)
"""For each message kind, the states in which it may occur, as bits."""
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
    """A transaction whose beginning has been returned in pieces; `ordinal` is that of its next change."""

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
    """The transactions of a run of messages. `begins` holds the index of each Begin, or -1 for a transaction
    that began before the run.
    """

    begins: IntArray
    xids: IntArray
    commits: Commits | None
    """The commits of the transactions; None for a run inside one transaction that is still open."""
    first_ordinal: int = 0

    @classmethod
    def inside(cls, transaction: OpenTransaction) -> Timeline:
        """Return the timeline of messages that all belong to one transaction, which began before them and has
        not ended.
        """
        return cls(np.array([-1]), np.array([transaction.xid]), None, transaction.ordinal)

    def place_at(self, frames: Frames, message: int) -> int:
        """Return a log position that is at or before the positions of this message's change and all later
        ones. For a whole transaction it is the position of its commit. That is sufficient, since a
        transaction makes its changes after the commits of the transactions whose locks it waited for. For an
        open transaction only the LSNs of its changes are known.
        """
        if self.commits is not None:
            return int(self.commits.positions[np.searchsorted(self.begins, message, side="right") - 1])
        lsns = _change_lsns(frames[message:])[1]
        return int(lsns[0]) if len(lsns) else 0

    def first_past(self, frames: Frames, place: int) -> int | None:
        """Return the index of the first message for which its change, and all later ones, have a position
        after `place`; None if there is no such message.
        """
        messages, places = (
            (self.begins, self.commits.positions) if self.commits is not None else _change_lsns(frames)
        )
        at = int(np.searchsorted(places, place, side="right"))
        return int(messages[at]) if at < len(messages) else None

    def of(self, messages: IntArray) -> IntArray:
        """Return the index of each message's transaction."""
        return np.searchsorted(self.begins, messages, side="right") - 1


def _change_lsns(frames: Frames) -> tuple[IntArray, IntArray]:
    """Return the indices of the changes, and their LSNs, which ascend within a transaction. The server sends
    no LSN with other messages, such as the Relation message before a change.
    """
    changes = np.flatnonzero(_CHANGES[frames.kinds])
    return changes, frames.i64(frames.starts[changes] + 1)


def check_order(frames: Frames, place: int) -> ByteArray:
    """Check that the sequence of messages is valid, starting in state `place`, and return the state after
    each message.
    """
    steps = _STEP[frames.kinds]
    after = (np.cumsum(steps, dtype=np.int64) + place).astype(np.uint8)
    # Only the first invalid message is reported, since the states after it are undefined. A shift that is too
    # wide gives 0.
    before = after - steps.view(np.uint8)
    right = (_MAY_FOLLOW[frames.kinds] >> before) & 1
    frames.require(
        right.view(np.bool_), np.arange(len(frames)), "is out of order among Begin, Commit and blocks"
    )
    return after


def decode_begins(frames: Frames) -> tuple[IntArray, IntArray]:
    """Return the indices of the Begin messages, and their xids."""
    begins = frames.where(BEGIN)
    starts = frames.starts[begins]
    frames.require(frames.ends[begins] - starts == _BEGIN_BYTES, begins, "has the wrong length")
    return begins, frames.u32(starts + HEADER_BYTES + 17)


def decode_commits(frames: Frames, last: Position, kind: int = COMMIT) -> Commits:
    """Decode every Commit message; their positions must increase from `last`."""
    commits = frames.where(kind)
    fields = frames.starts[commits] + frames.fields_at
    frames.require(frames.ends[commits] - fields == _COMMIT_BYTES, commits, "has the wrong length")
    positions = frames.i64(fields + 9)
    # The positions are compared, not subtracted: a damaged position may be so large that the difference
    # overflows.
    frames.require(
        positions > np.concatenate([[last.value], positions[:-1]]),
        commits,
        "does not move the position forward",
    )
    times = frames.i64(fields + 17)
    # The bounds are shifted, since shifting the values could overflow.
    sane = (times >= _FIRST_TIME - _POSTGRES_EPOCH) & (times <= _LAST_TIME - _POSTGRES_EPOCH)
    frames.require(sane, commits, "has an impossible time")
    return Commits(positions, times + _POSTGRES_EPOCH)


def decode_stream_commit(frames: Frames, index: int, last: Position) -> tuple[int, Commits]:
    """Return the xid of the transaction, and its commit. The message has the xid, then the fields of a
    Commit.
    """
    message = frames[index : index + 1].in_block()
    commits = decode_commits(message, last, STREAM_COMMIT)
    return int(message.xids(np.array([0]))[0]), commits
