"""Raw messages in, steps of the log out: whole transactions in runs, and pieces of those too long to wait for.

A call's messages are cut at the last Commit. What follows it, the beginning of an open transaction, is carried to the next call, up to a
limit; past it the transaction is given out in pieces, so that memory stays bounded whatever its length. One decoder serves one
connection: it relies on the server's order, and the server sends each table's shape once in a connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.change import LogStep, PiecesCommitted, Quiet, TransactionPiece, Transactions
from penstock.position import Position
from penstock.postgres.pgoutput.assemble import assemble
from penstock.postgres.pgoutput.framing import BEGIN, COMMIT, KEEPALIVE, BoolArray, Frames, IntArray, Payload, frame, join, payload_sizes
from penstock.postgres.pgoutput.messages import decode_keepalive
from penstock.postgres.pgoutput.relations import RelationHistory
from penstock.postgres.pgoutput.transactions import OpenTransaction, Timeline, check_order, decode_begins, decode_commits
from penstock.postgres.types.resolver import TypeResolver

PIECE_MESSAGES = 16_384
"""More at once fall out of the processor's caches."""

RUN_BYTES = 1 << 29
"""Messages are joined in runs of about this size: string offsets have 32 bits, and one message may have a gigabyte."""


class _Carry:
    """The messages of an open transaction that wait for its Commit."""

    def __init__(self) -> None:
        self._parts: list[Frames] = []
        self.messages = 0
        self.size_bytes = 0

    def put(self, frames: Frames) -> None:
        self._parts.append(frames)
        self.messages += len(frames)
        self.size_bytes += frames.size_bytes

    def take(self) -> list[Frames]:
        parts = self._parts
        self._parts, self.messages, self.size_bytes = [], 0, 0
        return parts


class PgOutputDecoder:
    """Decodes protocol version 1 of one replication connection."""

    def __init__(
        self,
        keys: Mapping[int, tuple[str, ...]] | None = None,
        types: TypeResolver | None = None,
        *,
        max_open_messages: int = 50_000,
        max_open_bytes: int = 32 << 20,
    ) -> None:
        """`keys` names the primary key columns by table OID; it is asked only for tables with replica identity FULL."""
        self._relations = RelationHistory(keys or {}, types or TypeResolver())
        self._max_open_messages = max_open_messages
        self._max_open_bytes = max_open_bytes
        self._carry = _Carry()
        self._is_open = False
        self._in_pieces: OpenTransaction | None = None
        self._last_commit = Position.ZERO

    @property
    def has_open_transaction(self) -> bool:
        return self._is_open

    @property
    def carried_messages(self) -> int:
        return self._carry.messages

    @property
    def carried_bytes(self) -> int:
        """The size of the messages that wait for their Commit."""
        return self._carry.size_bytes

    def decode(self, messages: Sequence[Payload]) -> list[LogStep]:
        """Take in the next messages of the log. After a `ProtocolError` the decoder is of no more use."""
        steps: list[LogStep] = []
        quiet_at: int | None = None
        for run, sizes in _runs(messages):
            frames, was_open = self._frame(run, sizes)
            open_after = check_order(frames, was_open)
            quiet_at = _quiet_place(frames, open_after, quiet_at)
            self._is_open = bool(open_after[-1])
            steps += self._take(frames)
        if quiet_at is not None and not self._is_open and quiet_at >= self._last_commit.value:
            steps.append(Quiet(Position.of(quiet_at)))
        return steps

    def _frame(self, messages: Sequence[Payload], sizes: IntArray) -> tuple[Frames, bool]:
        """The messages, and whether a transaction is open before them.

        What is carried is framed again with them unless it is the larger part: so a commit finds all its messages in one buffer, and
        still no message is copied more than a few times.
        """
        if self.carried_bytes > sizes.sum():
            return frame(messages, sizes), self._is_open
        return frame(messages, sizes, self._carry.take()), self._in_pieces is not None

    def _take(self, frames: Frames) -> Iterator[LogStep]:
        commits = frames.where(COMMIT)
        cut = int(commits[-1]) + 1 if len(commits) else 0
        if cut:
            before = self._carry.take()
            yield from self._decode_whole(join([*before, frames[:cut]]) if before else frames[:cut])
        if self._is_open:
            begins = frames.where(BEGIN)
            start = max(cut, int(begins[-1])) if len(begins) else cut
            self._carry.put(join([frames[start:]]) if start else frames)
            if self.carried_messages > self._max_open_messages or self.carried_bytes > self._max_open_bytes:
                for run in _gathered(self._carry.take()):
                    yield from self._decode_pieces(run)

    def _decode_whole(self, frames: Frames) -> Iterator[LogStep]:
        """Messages that end with a Commit."""
        if self._in_pieces is not None:
            first = int(frames.where(COMMIT)[0])
            yield from self._finish_pieces(self._in_pieces, frames[:first], frames[first : first + 1])
            frames = frames[first + 1 :]
        if len(frames):
            commits = decode_commits(frames, self._last_commit)
            begins, xids = decode_begins(frames)
            batches, _ = assemble(frames, Timeline(begins, xids, commits), self._relations)
            self._last_commit = commits.position(-1)
            yield Transactions(batches, self._last_commit, commits.time(-1), len(commits))

    def _decode_pieces(self, frames: Frames) -> Iterator[TransactionPiece]:
        """Messages of one open transaction. Its first piece is given out in any case, later ones if they have rows."""
        for low in range(0, len(frames), PIECE_MESSAGES):
            part = frames[low : low + PIECE_MESSAGES]
            begun = self._in_pieces
            if begun is None:
                begins, xids = decode_begins(part)
                timeline = Timeline(begins, xids, None)
            else:
                timeline = Timeline(np.array([-1]), np.array([begun.xid]), None, begun.ordinal)
            xid = int(timeline.xids[0])
            batches, next_ordinal = assemble(part, timeline, self._relations)
            self._in_pieces = OpenTransaction(xid, next_ordinal)
            if batches or begun is None:
                yield TransactionPiece(xid, batches)

    def _finish_pieces(self, begun: OpenTransaction, rest: Frames, commit: Frames) -> Iterator[LogStep]:
        yield from self._decode_pieces(rest)
        commits = decode_commits(commit, self._last_commit)
        self._last_commit = commits.position(-1)
        self._in_pieces = None
        yield PiecesCommitted(begun.xid, self._last_commit, commits.time(-1))


def _gathered(parts: Sequence[Frames]) -> Iterator[Frames]:
    """Puts small parts together, and leaves large ones where they are."""
    group: list[Frames] = []
    count = 0
    for part in parts:
        group.append(part)
        count += len(part)
        if count >= PIECE_MESSAGES // 2:
            yield join(group) if len(group) > 1 else part
            group, count = [], 0
    if group:
        yield join(group)


def _quiet_place(frames: Frames, open_after: BoolArray, before: int | None) -> int | None:
    """The WAL end of the last keepalive that came while nothing was open."""
    quiet: IntArray = np.flatnonzero((frames.kinds == KEEPALIVE) & ~open_after)
    return decode_keepalive(frames, int(quiet[-1])) if len(quiet) else before


def _runs(messages: Sequence[Payload]) -> Iterator[tuple[Sequence[Payload], IntArray]]:
    sizes = payload_sizes(messages)
    filled = np.cumsum(sizes)
    low = 0
    while low < len(messages):
        start = int(filled[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(filled, start + RUN_BYTES, side="right")))
        yield messages[low:high], sizes[low:high]
        low = high
