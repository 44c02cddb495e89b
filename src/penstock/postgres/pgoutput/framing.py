"""Join thousands of CopyData payloads into one buffer with numpy offsets. All other modules of the package
read from it.

A payload is XLogData (`w`, three 8-byte fields, then one pgoutput message) or a keepalive (`k`). The buffer
ends in padding that reads as null values: a read of damaged tuples may pass the last message before the
damage is detected, and the row of a TRUNCATE is read from the padding.
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
"""The limit of a Postgres tuple."""

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
    """Messages in log order. `starts` and `ends` bound each payload, header included; `kinds` is `KEEPALIVE`
    for keepalives.
    """

    buffer: bytes
    octets: ByteArray
    starts: IntArray
    ends: IntArray
    kinds: ByteArray
    xid_bytes: int = 0
    """Inside a block, an xid of this many bytes precedes the fields of a message."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def size_bytes(self) -> int:
        return int(self.ends[-1] - self.starts[0]) if len(self) else 0

    @property
    def padding_at(self) -> int:
        return len(self.buffer) - len(_PADDING)

    def __getitem__(self, part: slice) -> Frames:
        """A run of the messages over the same buffer."""
        return Frames(
            self.buffer, self.octets, self.starts[part], self.ends[part], self.kinds[part], self.xid_bytes
        )

    def in_block(self) -> Frames:
        """The same messages, decoded as the content of a block."""
        return replace(self, xid_bytes=XID_BYTES)

    @property
    def fields_at(self) -> int:
        """The offset of a message's own fields from its start."""
        return HEADER_BYTES + 1 + self.xid_bytes

    def xids(self, messages: IntArray) -> IntArray:
        """Inside a block: the xids of the (sub)transactions of the messages."""
        return self.u32(self.starts[messages] + HEADER_BYTES + 1)

    def view(self) -> memoryview:
        """The bytes of these messages, without a copy."""
        return memoryview(self.buffer)[self.starts[0] : self.ends[-1]]

    def where(self, kind: int) -> IntArray:
        """The indices of the messages of one kind."""
        return np.flatnonzero(self.kinds == kind)

    def u16(self, at: IntArray) -> IntArray:
        return self._gather(">u2", at)

    def u32(self, at: IntArray) -> IntArray:
        return self._gather(">u4", at)

    def i64(self, at: IntArray) -> IntArray:
        return self._gather(">i8", at)

    def _gather(self, dtype: str, at: IntArray) -> IntArray:
        # A view of the number at every byte offset, unaligned and big-endian, so that one numpy call reads
        # all of them.
        count = len(self.buffer) - np.dtype(dtype).itemsize + 1
        return np.ndarray((count,), dtype, self.buffer, 0, (1,))[at].astype(np.int64)

    def body(self, index: int) -> bytes:
        """The fields of a pgoutput message, or the keepalive after its head."""
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
    """Join payloads of the given sizes into one buffer, after those framed `before`, and find the kind of
    each.
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
    """Several runs as one, in a new buffer."""
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
