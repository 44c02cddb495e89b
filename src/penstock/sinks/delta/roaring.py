"""Sets of row numbers as Delta writes them: 64-bit Roaring bitmaps, in the portable form, behind a number of Delta's own.

All numbers are little-endian. A set is cut by its upper 32 bits into bitmaps of 32-bit numbers, and each of those by its own upper 16 into
containers: an array of 16-bit numbers, a bitmap of 65,536 bits, or runs. We write the first two and read all three.
https://github.com/RoaringBitmap/RoaringFormatSpec
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.postgres.types.arrays import distinct

Positions: TypeAlias = npt.NDArray[np.int64]
"""Row numbers of one file, ascending, each once."""

_MAGIC = 1681511377
_PLAIN_COOKIE = 12346
_RUN_COOKIE = 12347
_ARRAY_LIMIT = 4096
_BITMAP_BYTES = 8192
_OFFSETS_FROM = 4
"""With runs, so many containers have an offset each; fewer have none."""


def encode_positions(positions: Positions) -> bytes:
    """`positions`, which need not be in order, as bytes."""
    ascending = distinct(positions)
    if ascending.size and ascending[0] < 0:
        raise ValueError("a row number is negative")
    keys, starts = _runs(ascending >> 32)
    parts = [struct.pack("<IQ", _MAGIC, keys.size)]
    for key, bucket in zip(keys.tolist(), np.split(ascending, starts[1:]), strict=False):
        parts += (struct.pack("<I", key), _encode_bucket(bucket.astype(np.uint32)))
    return b"".join(parts)


def _encode_bucket(values: npt.NDArray[np.uint32]) -> bytes:
    """One bitmap of 32-bit numbers; `values` are in order."""
    keys, starts = _runs(values >> 16)
    counts = np.diff(starts, append=values.size)
    containers = [_encode_container(low) for low in np.split((values & 0xFFFF).astype("<u2"), starts[1:])]
    descriptions = np.empty((keys.size, 2), "<u2")
    descriptions[:, 0], descriptions[:, 1] = keys, counts - 1
    lengths = np.fromiter(map(len, containers), np.int64, len(containers))
    first = 8 + 8 * keys.size
    offsets = (first + np.cumsum(lengths) - lengths).astype("<u4")
    return b"".join((struct.pack("<II", _PLAIN_COOKIE, keys.size), descriptions.tobytes(), offsets.tobytes(), *containers))


def _runs(ascending: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Positions]:
    """Return each value once, and where its run begins."""
    starts = np.flatnonzero(np.concatenate([[True], ascending[1:] != ascending[:-1]])[: ascending.size])
    return ascending[starts], starts


def _encode_container(low: npt.NDArray[np.uint16]) -> bytes:
    if low.size <= _ARRAY_LIMIT:
        return low.tobytes()
    bits = np.zeros(1 << 16, np.uint8)
    bits[low] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def decode_positions(data: bytes) -> Positions:
    """The row numbers in `data`, ascending. `ValueError` for anything that is not exactly such a set."""
    source = _Source(data)
    if source.number("<I") != _MAGIC:
        raise ValueError("not a bitmap in the portable form")
    buckets = [np.empty(0, np.int64)]
    for _ in range(source.number("<Q")):
        key = source.number("<I")
        buckets.append(_decode_bucket(source) + (np.int64(key) << 32))
    if source.at != len(data):
        raise ValueError("a bitmap with something behind it")
    found = np.concatenate(buckets)
    if found.size > 1 and not bool(np.all(found[1:] > found[:-1])):
        raise ValueError("a bitmap whose numbers do not ascend")
    return found


class _Source:
    """Bytes, and how far they are read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, length: int) -> bytes:
        piece = self.data[self.at : self.at + length]
        if len(piece) != length:
            raise ValueError("a bitmap that is cut off")
        self.at += length
        return piece

    def number(self, form: str) -> int:
        (found,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(found)

    def shorts(self, count: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.take(2 * count), "<u2").astype(np.int64)


def _decode_bucket(source: _Source) -> Positions:
    cookie = source.number("<I")
    has_runs = cookie & 0xFFFF == _RUN_COOKIE
    if has_runs:
        count = (cookie >> 16) + 1
        runs = np.unpackbits(np.frombuffer(source.take((count + 7) // 8), np.uint8), bitorder="little")[:count].astype(bool)
    elif cookie == _PLAIN_COOKIE:
        count = source.number("<I")
        if count > 1 << 16:
            raise ValueError("a bitmap with more containers than there can be")
        runs = np.zeros(count, bool)
    else:
        raise ValueError("a bitmap of a kind that is not known")
    descriptions = source.shorts(2 * count).reshape(count, 2)
    if not has_runs or count >= _OFFSETS_FROM:
        source.take(4 * count)  # they follow one another anyway
    parts = [np.empty(0, np.int64)]
    for (key, fewer), is_run in zip(descriptions.tolist(), runs.tolist(), strict=True):
        low = _decode_runs(source) if is_run else _decode_container(source, fewer + 1)
        if low.size != fewer + 1:
            raise ValueError("a container that holds another count than it says")
        parts.append(low + (key << 16))
    return np.concatenate(parts)


def _decode_runs(source: _Source) -> Positions:
    pairs = source.shorts(2 * source.number("<H")).reshape(-1, 2)
    starts, lengths = pairs[:, 0], pairs[:, 1] + 1
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def _decode_container(source: _Source, count: int) -> Positions:
    if count <= _ARRAY_LIMIT:
        return source.shorts(count)
    bits = np.frombuffer(source.take(_BITMAP_BYTES), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.int64)
