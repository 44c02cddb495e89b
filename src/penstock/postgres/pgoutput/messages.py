"""The messages of the replication stream: join their payloads into one buffer with numpy offsets, and parse
the infrequent ones.

A payload is XLogData (`w`, three 8-byte fields, then one pgoutput message) or a keepalive (`k`). The buffer
ends in padding that reads as null values, for two reasons. A walk over damaged tuples may pass the last
message before the damage is detected. And a TRUNCATE has no row, so its null values are read from the
padding.

Infrequent messages are parsed one at a time. Begin and Commit, and row changes, are decoded in bulk; see
`transactions` and `rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.errors import ProtocolError, SlotTwoPhaseError
from penstock.position import Lsn

Payload = bytes | bytearray | memoryview
"""One CopyData payload, of any bytes-like type."""

IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]

HEADER_BYTES = 25
KEEPALIVE_BYTES = 18
MAX_COLUMNS = 1664
"""The maximum number of columns of a Postgres tuple."""

XID_BYTES = 4

BEGIN, COMMIT, ORIGIN, RELATION, TYPE, INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE = b"BCORYIUDTM"
STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT = b"SEcA"
KEEPALIVE = 0

_PADDING = b"n" * (MAX_COLUMNS + 8)
_XLOG_DATA, _KEEPALIVE_HEAD = b"wk"
_KNOWN = np.zeros(256, np.bool_)
_KNOWN[[BEGIN, COMMIT, ORIGIN, RELATION, TYPE, INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE]] = True
_KNOWN[[STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT]] = True
_TWO_PHASE = frozenset(b"bPKrp")


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """Messages in log order. `starts` and `ends` are the offsets of each payload, including its header.
    `kinds` is `KEEPALIVE` for keepalives.
    """

    buffer: bytes
    octets: ByteArray
    starts: IntArray
    ends: IntArray
    kinds: ByteArray
    xid_bytes: int = 0
    """Inside a block, an xid precedes the fields of each message. This is its size; 0 outside of blocks."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def size_bytes(self) -> int:
        return int(self.ends[-1] - self.starts[0]) if len(self) else 0

    @property
    def padding_at(self) -> int:
        return len(self.buffer) - len(_PADDING)

    def __getitem__(self, part: slice) -> Frames:
        """Return a run of the messages, over the same buffer."""
        return Frames(
            self.buffer, self.octets, self.starts[part], self.ends[part], self.kinds[part], self.xid_bytes
        )

    def in_block(self) -> Frames:
        """Return the same messages as the content of a block, in which an xid precedes the fields of each
        message.
        """
        return replace(self, xid_bytes=XID_BYTES)

    @property
    def fields_at(self) -> int:
        """The offset of a message's own fields from its start."""
        return HEADER_BYTES + 1 + self.xid_bytes

    def xids(self, messages: IntArray) -> IntArray:
        """Return the xids of the (sub)transactions of messages inside a block."""
        return self.u32(self.starts[messages] + HEADER_BYTES + 1)

    def view(self) -> memoryview:
        """Return the bytes of these messages, without a copy."""
        return memoryview(self.buffer)[self.starts[0] : self.ends[-1]]

    def where(self, kind: int) -> IntArray:
        """Return the indices of the messages of one kind."""
        return np.flatnonzero(self.kinds == kind)

    def u16(self, at: IntArray) -> IntArray:
        return self._gather(">u2", at)

    def u32(self, at: IntArray) -> IntArray:
        return self._gather(">u4", at)

    def i64(self, at: IntArray) -> IntArray:
        return self._gather(">i8", at)

    def _gather(self, dtype: str, at: IntArray) -> IntArray:
        # The array shows the buffer as a big-endian number at every byte offset, also unaligned, so that one
        # numpy call reads all numbers.
        count = len(self.buffer) - np.dtype(dtype).itemsize + 1
        return np.ndarray((count,), dtype, self.buffer, 0, (1,))[at].astype(np.int64)

    def body(self, index: int) -> bytes:
        """Return the fields of a pgoutput message, or of a keepalive (without its first byte)."""
        skip = 1 if self.kinds[index] == KEEPALIVE else self.fields_at
        return self.buffer[self.starts[index] + skip : self.ends[index]]

    def require(self, ok: BoolArray, messages: IntArray, reason: str) -> None:
        """Raise an error for the first of `messages` whose `ok` is False."""
        if not ok.all():
            raise self.fault(int(messages[np.argmin(ok)]), reason)

    def fault(self, index: int, reason: str) -> ProtocolError:
        start = int(self.starts[index])
        lsn = Lsn(int.from_bytes(self.buffer[start + 1 : start + 9], "big"))
        kind = int(self.kinds[index])
        name = "keepalive" if kind == KEEPALIVE else f"message {chr(kind)!r}"
        return ProtocolError(f"{name} at {lsn}: {reason}")


def frame(messages: Sequence[Payload], sizes: IntArray, before: Sequence[Frames] = ()) -> Frames:
    """Join payloads into one buffer, after the messages in `before`, and find the kind of each. `sizes` has
    the size of each payload in `messages`.
    """
    sizes = np.concatenate([*(part.ends - part.starts for part in before), sizes])
    ends = np.cumsum(sizes)
    starts = ends - sizes
    buffer = b"".join((*map(Frames.view, before), *messages, _PADDING))
    octets = np.frombuffer(buffer, np.uint8)
    heads = octets[starts]
    is_data = heads == _XLOG_DATA
    kinds = octets[np.minimum(starts + HEADER_BYTES, len(octets) - 1)]
    if is_data.all():
        fit = (sizes > HEADER_BYTES) & _KNOWN[kinds]
    else:
        fit = np.where(
            is_data,
            (sizes > HEADER_BYTES) & _KNOWN[kinds],
            (heads == _KEEPALIVE_HEAD) & (sizes == KEEPALIVE_BYTES),
        )
        kinds = np.where(is_data, kinds, np.uint8(KEEPALIVE))
    frames = Frames(buffer, octets, starts, ends, kinds)
    if not fit.all():
        bad = int(np.argmin(fit))
        if is_data[bad] and sizes[bad] > HEADER_BYTES:
            raise (
                _two_phase() if int(kinds[bad]) in _TWO_PHASE else frames.fault(bad, "is of an unknown kind")
            )
        raise ProtocolError(f"message {bad} of {len(sizes)} is neither WAL data nor a keepalive")
    return frames


def _two_phase() -> SlotTwoPhaseError:
    return SlotTwoPhaseError(
        "the slot was created with two_phase: it sends transactions when they are prepared, before it is "
        "known whether they commit",
        hint="stop the capture, drop the slot with pg_drop_replication_slot, and resync: penstock creates "
        "it without two_phase",
    )


def payload_sizes(messages: Sequence[Payload]) -> IntArray:
    return np.fromiter(map(len, messages), np.int64, len(messages))


def join(parts: Sequence[Frames]) -> Frames:
    """Join several runs of messages into one, in a new buffer."""
    runs = [part for part in parts if len(part)]
    buffer = b"".join((*map(Frames.view, runs), _PADDING))
    shifts = list(_shifts(runs))
    starts = np.concatenate([part.starts + shift for part, shift in zip(runs, shifts, strict=True)])
    ends = np.concatenate([part.ends + shift for part, shift in zip(runs, shifts, strict=True)])
    kinds = np.concatenate([part.kinds for part in runs])
    return Frames(buffer, np.frombuffer(buffer, np.uint8), starts, ends, kinds)


def _shifts(runs: Sequence[Frames]) -> Iterator[int]:
    filled = 0
    for run in runs:
        yield filled - int(run.starts[0])
        filled += run.size_bytes


REPLICA_IDENTITIES = "dnfi"


@dataclass(frozen=True, slots=True)
class RelationColumn:
    name: str
    is_key: bool
    type_oid: int
    type_modifier: int


@dataclass(frozen=True, slots=True)
class Relation:
    """The definition of a table from the Relation message on."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]

    @property
    def is_full(self) -> bool:
        return self.replica_identity == "f"


@dataclass(frozen=True, slots=True)
class Message:
    """A logical message; its content is not interpreted here."""

    is_transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes


class _Reader:
    """Reads the fields of one message, and never past its end."""

    def __init__(self, frames: Frames, index: int) -> None:
        self._frames = frames
        self._index = index
        self._body = frames.body(index)
        self._at = 0

    def fault(self, reason: str) -> ProtocolError:
        return self._frames.fault(self._index, reason)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._body):
            raise self.fault("ends inside a field")
        field = self._body[self._at : end]
        self._at = end
        return field

    def number(self, count: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "big", signed=signed)

    def text(self) -> str:
        return _shown(self.octets())

    def octets(self) -> bytes:
        """Return the bytes up to the next zero byte."""
        end = self._body.find(b"\0", self._at)
        if end < 0:
            raise self.fault("has a name without an end")
        field = self._body[self._at : end]
        self._at = end + 1
        return field

    def finish(self) -> None:
        if self._at != len(self._body):
            raise self.fault("is longer than its fields")


def decode_relation(frames: Frames, index: int) -> Relation:
    reader = _Reader(frames, index)
    oid = reader.number(4)
    # An empty namespace means pg_catalog.
    namespace = reader.text() or "pg_catalog"
    name = reader.text()
    identity = chr(reader.number(1))
    if identity not in REPLICA_IDENTITIES:
        raise reader.fault("has an unknown replica identity")
    count = reader.number(2)
    if count > MAX_COLUMNS:
        raise reader.fault("has more columns than a table can")
    taken: dict[str, bytes] = {}
    columns = tuple(_column(reader, taken) for _ in range(count))
    reader.finish()
    return Relation(oid, namespace, name, identity, columns)


def _column(reader: _Reader, taken: dict[str, bytes]) -> RelationColumn:
    """Read one column. `taken` has the names of the columns before it. A name that had to be escaped is made
    distinct from them.
    """
    is_key = bool(reader.number(1) & 1)
    octets = reader.octets()
    name = _shown(octets)
    while name in taken:
        if taken[name] == octets:
            raise reader.fault("names a column twice")
        name += "\\"
    taken[name] = octets
    return RelationColumn(name, is_key, reader.number(4), reader.number(4, signed=True))


def _shown(octets: bytes) -> str:
    """Decode a name. In a SQL_ASCII database, names may be invalid UTF-8. This affects one table only, so
    invalid bytes are escaped instead of raising an error.
    """
    return octets.decode(errors="backslashreplace")


def decode_type(frames: Frames, index: int) -> tuple[int, str, str]:
    """Return a type's OID, and its namespace and name. For a domain, namespace and name are those of its base
    type.
    """
    reader = _Reader(frames, index)
    found = reader.number(4), reader.text() or "pg_catalog", reader.text()
    reader.finish()
    return found


def decode_message(frames: Frames, index: int) -> Message:
    reader = _Reader(frames, index)
    is_transactional = bool(reader.number(1) & 1)
    lsn = Lsn(reader.number(8))
    prefix = reader.text()
    content = reader.take(reader.number(4))
    reader.finish()
    return Message(is_transactional, lsn, prefix, content)


def decode_stream_start(frames: Frames, index: int) -> tuple[int, bool]:
    """Return the transaction's xid, and whether this is its first block."""
    reader = _Reader(frames, index)
    xid, flag = reader.number(4), reader.number(1)
    reader.finish()
    return xid, flag == 1


def check_stream_stop(frames: Frames, index: int) -> None:
    _Reader(frames, index).finish()


def decode_stream_abort(frames: Frames, index: int) -> tuple[int, int]:
    """Return the xids of the transaction and of the subtransaction that was rolled back. They are equal if
    the whole transaction was rolled back.
    """
    reader = _Reader(frames, index)
    found = reader.number(4), reader.number(4)
    reader.finish()
    return found


def decode_truncate(frames: Frames, index: int) -> tuple[int, ...]:
    """Return the OIDs of the truncated tables, in order."""
    reader = _Reader(frames, index)
    count = reader.number(4)
    reader.take(1)
    oids = tuple(int.from_bytes(reader.take(4), "big") for _ in range(count))
    reader.finish()
    return oids


def decode_keepalive(frames: Frames, index: int) -> int:
    """Return the server's WAL end: everything that commits below it has been sent."""
    return _Reader(frames, index).number(8)
