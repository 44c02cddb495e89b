"""Raw messages in, steps of the log out: whole transactions in runs, and pieces of those too long to wait for.

A call's messages are cut at the last Commit. What follows it, the beginning of a transaction that has committed but has not arrived as a
whole, is carried to the next call, up to a limit; past it the transaction is given out in pieces, so that memory stays bounded whatever
its length. Under protocol version 2 the server itself sends long transactions in blocks, while they are open and among others; what a
call holds of a block is given out at once, as a piece. One decoder serves one connection: it relies on the server's order, and the server
sends each table's shape once in a connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

import numpy as np

from penstock.change import LogStep, PiecesAborted, PiecesCommitted, Quiet, TransactionPiece, Transactions
from penstock.position import Position
from penstock.postgres.pgoutput.assemble import Assembled, assemble
from penstock.postgres.pgoutput.framing import (
    BEGIN,
    COMMIT,
    KEEPALIVE,
    STREAM_ABORT,
    STREAM_COMMIT,
    STREAM_START,
    STREAM_STOP,
    ByteArray,
    Frames,
    IntArray,
    Payload,
    frame,
    join,
    payload_sizes,
)
from penstock.postgres.pgoutput.keys import FullKeys, LoadKey
from penstock.postgres.pgoutput.logical import find_loose_messages
from penstock.postgres.pgoutput.messages import check_stream_stop, decode_keepalive, decode_stream_abort, decode_stream_start
from penstock.postgres.pgoutput.relations import RelationHistory, Versions
from penstock.postgres.pgoutput.transactions import (
    BETWEEN,
    IN_TRANSACTION,
    OpenTransaction,
    Timeline,
    check_order,
    decode_begins,
    decode_commits,
    decode_stream_commit,
)
from penstock.postgres.types.resolver import TypeResolver

PIECE_MESSAGES = 16_384
"""More at once fall out of the processor's caches."""

RUN_BYTES = 1 << 29
"""Messages are joined in runs of about this size: string offsets have 32 bits, and one message may have a gigabyte."""

_BOUNDS = np.zeros(256, np.bool_)
_BOUNDS[[STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT]] = True


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
    """Decodes protocol versions 1 and 2 of one replication connection."""

    def __init__(
        self,
        keys: Mapping[int, tuple[str, ...]] | None = None,
        types: TypeResolver | None = None,
        *,
        load_key: LoadKey | None = None,
        prefixes: Set[str] = frozenset(),
        old_rows: bool = False,
        max_open_messages: int = 50_000,
        max_open_bytes: int = 32 << 20,
    ) -> None:
        """`keys` names the key columns by table OID, as of where the log begins; `load_key` asks for those of now. See `pgoutput.keys`.

        `prefixes` are those of the logical messages to be given out; all others are passed over. With `old_rows`, rows as they were before
        an update or a delete are given out as well, where the log has them.
        """
        self._relations = RelationHistory(FullKeys(keys or {}, load_key), types or TypeResolver())
        self._prefixes = prefixes
        self._old_rows = old_rows
        self._max_open_messages = max_open_messages
        self._max_open_bytes = max_open_bytes
        self._carry = _Carry()
        self._place = BETWEEN
        self._in_pieces: OpenTransaction | None = None
        self._streams: dict[int, OpenTransaction] = {}
        self._block: int | None = None
        self._last_commit = Position.ZERO

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
            frames, place = self._frame(run, sizes)
            places = check_order(frames, place)
            quiet_at = _quiet_place(frames, places, quiet_at)
            self._place = int(places[-1])
            steps += self._take(frames, places)
        if quiet_at is not None and self._place == BETWEEN and quiet_at >= self._last_commit.value:
            steps.append(Quiet(Position.of(quiet_at)))
        return steps

    def _frame(self, messages: Sequence[Payload], sizes: IntArray) -> tuple[Frames, int]:
        """The messages, and where the log is before them.

        What is carried is framed again with them unless it is the larger part: so a commit finds all its messages in one buffer, and
        still no message is copied more than a few times.
        """
        if self._place != IN_TRANSACTION or self.carried_bytes > sizes.sum():
            return frame(messages, sizes), self._place
        return frame(messages, sizes, self._carry.take()), BETWEEN if self._in_pieces is None else IN_TRANSACTION

    def _take(self, frames: Frames, places: ByteArray) -> Iterator[LogStep]:
        """Cut the messages where a block begins or ends, and where a transaction in blocks does."""
        low = 0
        for bound in map(int, np.flatnonzero(_BOUNDS[frames.kinds])):
            yield from self._take_run(frames[low:bound], places[low:bound])
            yield from self._take_bound(frames, bound)
            low = bound + 1
        yield from self._take_run(frames[low:], places[low:])

    def _take_run(self, frames: Frames, places: ByteArray) -> Iterator[LogStep]:
        if not len(frames):
            return
        if self._block is not None:
            yield from self._decode_block(self._block, frames.in_block())
            return
        if self._prefixes:
            yield from find_loose_messages(frames, places, self._prefixes)
        yield from self._take_transactions(frames, is_open=places[-1] == IN_TRANSACTION)

    # --- whole transactions ----------------------------------------------------------------------------------------------

    def _take_transactions(self, frames: Frames, *, is_open: bool) -> Iterator[LogStep]:
        commits = frames.where(COMMIT)
        cut = int(commits[-1]) + 1 if len(commits) else 0
        if cut:
            before = self._carry.take()
            yield from self._decode_whole(join([*before, frames[:cut]]) if before else frames[:cut])
        if is_open:
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
            timeline = Timeline(*decode_begins(frames), commits)
            found = self._assemble(frames, timeline, self._relations.advance(frames, timeline))
            self._last_commit = commits.position(-1)
            yield Transactions(found.batches, self._last_commit, commits.time(-1), len(commits), found.messages)

    def _decode_pieces(self, frames: Frames) -> Iterator[TransactionPiece]:
        """Messages of one transaction that has not arrived as a whole. Its first piece is given out in any case."""
        if self._in_pieces is None:
            _, xids = decode_begins(frames)
            self._in_pieces = OpenTransaction(int(xids[0]), 0)
            yield TransactionPiece(self._in_pieces.xid, ())
        for part in _parts(frames):
            timeline = Timeline.inside(self._in_pieces)
            found = self._assemble(part, timeline, self._relations.advance(part, timeline))
            self._in_pieces = OpenTransaction(self._in_pieces.xid, found.next_ordinal)
            if found.batches or found.messages:
                yield TransactionPiece(self._in_pieces.xid, found.batches, found.messages)

    def _finish_pieces(self, begun: OpenTransaction, rest: Frames, commit: Frames) -> Iterator[LogStep]:
        yield from self._decode_pieces(rest)
        commits = decode_commits(commit, self._last_commit)
        self._last_commit = commits.position(-1)
        self._in_pieces = None
        yield PiecesCommitted(begun.xid, self._last_commit, commits.time(-1))

    # --- transactions in blocks --------------------------------------------------------------------------------------------

    def _take_bound(self, frames: Frames, index: int) -> Iterator[LogStep]:
        match int(frames.kinds[index]):
            case kind if kind == STREAM_START:
                yield from self._start_block(frames, index)
            case kind if kind == STREAM_STOP:
                check_stream_stop(frames, index)
                self._block = None
            case kind if kind == STREAM_COMMIT:
                xid, commits = decode_stream_commit(frames, index, self._last_commit)
                self._require_open(frames, index, xid)
                keys = self._relations.commit(xid)
                del self._streams[xid]
                self._last_commit = commits.position(-1)
                yield PiecesCommitted(xid, self._last_commit, commits.time(-1), keys)
            case _:
                yield from self._abort_block(frames, index)

    def _abort_block(self, frames: Frames, index: int) -> Iterator[LogStep]:
        xid, subxid = decode_stream_abort(frames, index)
        if subxid != xid and xid not in self._streams:
            # From 18 on the server drops a transaction that it finds rolled back before it has sent any of it, and yet ends its parts.
            return
        self._require_open(frames, index, xid)
        self._relations.forget(xid, is_whole=subxid == xid)
        if subxid == xid:
            del self._streams[xid]
        yield PiecesAborted(xid, subxid)

    def _start_block(self, frames: Frames, index: int) -> Iterator[LogStep]:
        self._block, is_first = decode_stream_start(frames, index)
        if is_first == (self._block in self._streams):
            raise frames.fault(index, "begins a transaction that is open, or goes on with one that is not")
        if is_first:
            self._streams[self._block] = OpenTransaction(self._block, 0)
            yield TransactionPiece(self._block, ())

    def _decode_block(self, xid: int, frames: Frames) -> Iterator[LogStep]:
        for part in _parts(frames):
            timeline = Timeline.inside(self._streams[xid])
            found = self._assemble(part, timeline, self._relations.advance(part, timeline, xid))
            self._streams[xid] = OpenTransaction(xid, found.next_ordinal)
            if found.batches or found.messages:
                yield TransactionPiece(xid, found.batches, found.messages)

    def _assemble(self, frames: Frames, timeline: Timeline, versions: Versions) -> Assembled:
        return assemble(frames, timeline, versions, self._prefixes, old_rows=self._old_rows)

    def _require_open(self, frames: Frames, index: int, xid: int) -> None:
        if xid not in self._streams:
            raise frames.fault(index, "ends a transaction that is not open")


def _parts(frames: Frames) -> Iterator[Frames]:
    return (frames[low : low + PIECE_MESSAGES] for low in range(0, len(frames), PIECE_MESSAGES))


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


def _quiet_place(frames: Frames, places: ByteArray, before: int | None) -> int | None:
    """The WAL end of the last keepalive that came between transactions."""
    quiet: IntArray = np.flatnonzero((frames.kinds == KEEPALIVE) & (places == BETWEEN))
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
