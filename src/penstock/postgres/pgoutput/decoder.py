"""Decode pgoutput messages into log steps: runs of whole transactions, and pieces of transactions that are
too large to buffer.

The tuples of all tables in a run are read together. Each table then selects, for every row, the tuple that
contains the row's values.

The messages of a call are cut after the last Commit. The messages after it are the beginning of a transaction
that has not arrived completely. They are carried to the next call, up to a size limit. Beyond the limit the
transaction is returned in pieces, so memory is bounded for any transaction length. With protocol version 2
the server sends long transactions in blocks while they are open, interleaved with others. The part of a block
that a call contains is returned at once, as a piece.

One decoder serves one connection: it relies on the message order, and the server describes each table only
once per connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from penstock.change import (
    ChangeBatch,
    Idle,
    LogicalMessage,
    LogStep,
    PiecesAborted,
    PiecesCommitted,
    TransactionPiece,
    Transactions,
)
from penstock.position import Position
from penstock.postgres.pgoutput.changes import (
    COUNT_BYTES,
    NEW,
    Changes,
    TableChanges,
    find_changes,
    find_loose_messages,
    find_messages,
    group,
)
from penstock.postgres.pgoutput.messages import (
    BEGIN,
    COMMIT,
    KEEPALIVE,
    STREAM_ABORT,
    STREAM_COMMIT,
    STREAM_START,
    STREAM_STOP,
    TRUNCATE,
    ByteArray,
    Frames,
    IntArray,
    Payload,
    check_stream_stop,
    decode_keepalive,
    decode_stream_abort,
    decode_stream_start,
    frame,
    join,
    payload_sizes,
)
from penstock.postgres.pgoutput.relations import FullKeys, LoadKey, RelationHistory, Versions
from penstock.postgres.pgoutput.rows import TablePart, Tuples, build_batches, walk
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
from penstock.postgres.types.registry import TypeResolver


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    batches: tuple[ChangeBatch, ...]
    """The batches in log order."""
    messages: tuple[LogicalMessage, ...]
    next_ordinal: int
    """The ordinal that the next change in the last transaction will have."""


def assemble(
    frames: Frames,
    timeline: Timeline,
    versions: Versions,
    prefixes: Set[str] = frozenset(),
    *,
    old_rows: bool = False,
) -> Assembled:
    """Decode a run of messages of whole transactions, or of one open transaction."""
    changes, next_ordinal = find_changes(frames, timeline)
    messages = find_messages(frames, timeline, changes, prefixes) if prefixes else ()
    if not len(changes):
        return Assembled((), messages, next_ordinal)
    groups = group(frames, changes, versions)
    ordered = changes[np.concatenate([item.members for item in groups])]
    widths = np.repeat([len(item.table.columns) for item in groups], [len(item.members) for item in groups])
    tuples = _walk_all(frames, ordered, widths)
    batches = build_batches(frames, timeline, _split(groups, ordered, tuples), old_rows=old_rows)
    in_order = np.argsort([item.members[0] for item in groups], kind="stable").tolist()
    return Assembled(tuple(batch for at in in_order for batch in batches[at]), messages, next_ordinal)


def _walk_all(frames: Frames, changes: Changes, widths: IntArray) -> Tuples:
    is_truncate = changes.kinds == TRUNCATE
    ends = np.where(is_truncate, changes.tuples + widths, frames.ends[changes.messages])
    counted = frames.u16(changes.tuples - COUNT_BYTES) == widths
    frames.require(counted | is_truncate, changes.messages, "has another number of columns than its table")
    first, after = walk(frames, changes.messages, changes.tuples, ends, widths)
    if is_truncate.any():
        # The nulls of a TRUNCATE were read from the padding, but Arrow requires ascending offsets in a
        # column.
        for column in first:
            own = is_truncate[: len(column.spans)]
            column.spans[own] = frames.starts[changes.messages[: len(own)][own], np.newaxis]
    two = np.flatnonzero(changes.has_old)
    if not len(two):
        frames.require(after == ends, changes.messages, "is longer than its tuple")
        return Tuples(first, [])
    frames.require((after == ends) | changes.has_old, changes.messages, "is longer than its tuple")
    messages, at, ends, widths = changes.messages[two], after[two], ends[two], widths[two]
    frames.require(at + 1 + COUNT_BYTES <= ends, messages, "ends before its new tuple")
    frames.require(
        (frames.octets[at] == NEW) & (frames.u16(at + 1) == widths), messages, "has an unexpected new tuple"
    )
    second, after = walk(frames, messages, at + 1 + COUNT_BYTES, ends, widths)
    frames.require(after == ends, messages, "is longer than its tuples")
    return Tuples(first, second)


def _split(groups: Sequence[TableChanges], changes: Changes, tuples: Tuples) -> list[TablePart]:
    """Return for each group its slices: of the changes, of the first tuples and of the second tuples."""
    parts: list[TablePart] = []
    low = second_low = 0
    for item in groups:
        width = len(item.table.columns)
        high = low + len(item.members)
        own = changes[low:high]
        second_high = second_low + int(np.count_nonzero(own.has_old))
        first = [column[low:high] for column in tuples.first[:width]]
        second = (
            [column[second_low:second_high] for column in tuples.second[:width]]
            if second_low < second_high
            else []
        )
        parts.append(TablePart(item.table, own, Tuples(first, second), item.is_full))
        low, second_low = high, second_high
    return parts


PIECE_MESSAGES = 16_384
"""The maximum number of messages that are decoded at once. More would not fit into the processor's caches."""

RUN_BYTES = 1 << 29
"""The size at which the messages of a call are split into runs. It is limited because string offsets have 32
bits, and because one message may have a gigabyte.
"""

_BOUNDS = np.zeros(256, np.bool_)
_BOUNDS[[STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT]] = True


class _Carry:
    """The messages of an open transaction whose Commit has not arrived."""

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
        """`keys` are the key columns by table OID at the start of the log. `load_key` queries the current key
        of a table, see `pgoutput.relations`. Only logical messages with one of `prefixes` are returned. With
        `old_rows`, rows before an update or a delete are returned too if the log contains them.
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
        """The size of the messages whose Commit has not arrived."""
        return self._carry.size_bytes

    def decode(self, messages: Sequence[Payload]) -> list[LogStep]:
        """Decode the next messages of the log. After a `ProtocolError` the decoder must not be used again."""
        steps: list[LogStep] = []
        quiet_at: int | None = None
        for run, sizes in _runs(messages):
            frames, place = self._frame(run, sizes)
            places = check_order(frames, place)
            quiet_at = _quiet_place(frames, places, quiet_at)
            self._place = int(places[-1])
            steps += self._take(frames, places)
        if quiet_at is not None and self._place == BETWEEN and quiet_at >= self._last_commit.value:
            steps.append(Idle(Position.of(quiet_at)))
        return steps

    def _frame(self, messages: Sequence[Payload], sizes: IntArray) -> tuple[Frames, int]:
        """Return the framed messages, and the log state before them. Carried messages are framed again
        together with the new ones, unless the carried ones are the larger part. So a commit usually finds all
        messages of its transaction in one buffer, and no message is copied more than a few times.
        """
        if self._place != IN_TRANSACTION or self.carried_bytes > sizes.sum():
            return frame(messages, sizes), self._place
        return frame(
            messages, sizes, self._carry.take()
        ), BETWEEN if self._in_pieces is None else IN_TRANSACTION

    def _take(self, frames: Frames, places: ByteArray) -> Iterator[LogStep]:
        """Decode the messages, cut at the start and end of each block, and at the end of each transaction
        sent in blocks.
        """
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

    # --- whole transactions ---------------------------------------------------------------------------------

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
        """Decode messages that end with a Commit."""
        if self._in_pieces is not None:
            first = int(frames.where(COMMIT)[0])
            yield from self._finish_pieces(self._in_pieces, frames[:first], frames[first : first + 1])
            frames = frames[first + 1 :]
        if len(frames):
            commits = decode_commits(frames, self._last_commit)
            timeline = Timeline(*decode_begins(frames), commits)
            found = self._assemble(frames, timeline, self._relations.advance(frames, timeline))
            self._last_commit = commits.position(-1)
            yield Transactions(
                found.batches, self._last_commit, commits.time(-1), len(commits), found.messages
            )

    def _decode_pieces(self, frames: Frames) -> Iterator[TransactionPiece]:
        """Decode messages of one incomplete transaction. The first piece of a transaction is returned even if
        it is empty.
        """
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

    # --- transactions in blocks -----------------------------------------------------------------------------

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
            # Since version 18 the server omits a transaction that was rolled back before it sent any of it,
            # but still sends the ends of its blocks.
            return
        self._require_open(frames, index, xid)
        self._relations.forget(xid, is_whole=subxid == xid)
        if subxid == xid:
            del self._streams[xid]
        yield PiecesAborted(xid, subxid)

    def _start_block(self, frames: Frames, index: int) -> Iterator[LogStep]:
        self._block, is_first = decode_stream_start(frames, index)
        if is_first == (self._block in self._streams):
            raise frames.fault(index, "begins a transaction that is open, or continues one that is not")
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
    """Join small parts, and leave large ones as they are."""
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
    """Return the WAL end of the last keepalive between transactions; `before` if there is no keepalive."""
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
