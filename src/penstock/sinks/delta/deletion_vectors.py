"""Deletion vectors: the rows removed from a data file, as 64-bit Roaring bitmaps, inline in the log or in
files. Also the check of the file paths in a log.

Anyone who can write to the table's directory can write any path into its log. Every path is checked before
the file is opened or removed: it must be inside the table's directory, outside `_delta_log`, and without a
symbolic link below that directory.

All numbers are little-endian. A set is divided by the upper 32 bits into bitmaps of 32-bit numbers. Each of
these bitmaps is divided by the upper 16 bits into containers: an array of 16-bit numbers, a bitmap of 65,536
bits, or runs. Penstock writes the first two kinds and reads all three.
https://github.com/RoaringBitmap/RoaringFormatSpec

A vector file has one vector for each data file that a commit affects. Each vector is preceded by its length
and followed by its CRC-32, both big-endian.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import quote, unquote, urlsplit
from uuid import UUID, uuid4

import numpy as np
import numpy.typing as npt

from penstock import storage
from penstock.arrow import distinct
from penstock.errors import FileOutsideTableError, SinkError, TargetFileLostError
from penstock.sinks.row_files import removed_on_failure

_LOG = "_delta_log"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]*")


def name_in_table(root: Path, uri: str) -> str:
    """The normalised path of a file, relative to the table at `root`, from the `uri` in the log. Does not
    access the file.
    """
    if _PLAIN.fullmatch(uri):  # the common case; a table may have a hundred thousand files
        return uri
    try:
        parts = urlsplit(uri)
        uri.encode()
    except ValueError:  # not a URL, or not a valid file name
        raise _refused(root) from None
    if parts.scheme not in ("", "file") or parts.netloc:
        raise _refused(root)
    # In a relative path, `?` and `#` are escaped, so only URLs are split.
    path = os.path.normpath(os.path.join(root, unquote(parts.path if parts.scheme else uri)))  # noqa: PTH118 `Path` keeps `..`
    base = Path(os.path.normpath(root))
    if not Path(path).is_relative_to(base) or "\0" in path:
        raise _refused(root)
    name = Path(path).relative_to(base)
    if not name.parts or name.parts[0] == _LOG:
        raise _refused(root)
    return str(name)


def table_file(root: Path, uri: str) -> Path:
    """The path of the file that the log calls `uri`. Raises `FileOutsideTableError` if the file is outside of
    the table at `root`.
    """
    name = name_in_table(root, uri)
    real = root.resolve() / name
    if real.resolve() != real:
        raise _refused(root)
    return root / name


def _refused(root: Path) -> FileOutsideTableError:
    return FileOutsideTableError(
        f"the log of the Delta table at {root} names a file outside of the table's directory",
        hint=f"check who wrote the log; then remove {root} and run again to copy the table (of a shallow "
        "clone, make a deep one)",
    )


Positions: TypeAlias = npt.NDArray[np.int64]
"""Row numbers of one file, ascending and distinct."""

_MAGIC = 1681511377
_PLAIN_COOKIE = 12346
_RUN_COOKIE = 12347
_ARRAY_LIMIT = 4096
_BITMAP_BYTES = 8192
_OFFSETS_FROM = 4
"""A bitmap with runs has container offsets only if it has at least this many containers."""


def encode_positions(positions: Positions) -> bytes:
    """Serialise `positions`, in any order."""
    ascending = distinct(positions)
    if ascending.size and ascending[0] < 0:
        raise ValueError("a row number is negative")
    keys, starts = _runs(ascending >> 32)
    parts = [struct.pack("<IQ", _MAGIC, keys.size)]
    for key, bucket in zip(keys.tolist(), np.split(ascending, starts[1:]), strict=False):
        parts += (struct.pack("<I", key), _encode_bucket(bucket.astype(np.uint32)))
    return b"".join(parts)


def _encode_bucket(values: npt.NDArray[np.uint32]) -> bytes:
    """Serialise one bitmap of 32-bit numbers; `values` are ascending."""
    keys, starts = _runs(values >> 16)
    counts = np.diff(starts, append=values.size)
    containers = [_encode_container(low) for low in np.split((values & 0xFFFF).astype("<u2"), starts[1:])]
    descriptions = np.empty((keys.size, 2), "<u2")
    descriptions[:, 0], descriptions[:, 1] = keys, counts - 1
    lengths = np.fromiter(map(len, containers), np.int64, len(containers))
    first = 8 + 8 * keys.size
    offsets = (first + np.cumsum(lengths) - lengths).astype("<u4")
    return b"".join(
        (struct.pack("<II", _PLAIN_COOKIE, keys.size), descriptions.tobytes(), offsets.tobytes(), *containers)
    )


def _runs(ascending: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Positions]:
    """The distinct values, and where each run of equal values begins."""
    starts = np.flatnonzero(np.concatenate([[True], ascending[1:] != ascending[:-1]])[: ascending.size])
    return ascending[starts], starts


def _encode_container(low: npt.NDArray[np.uint16]) -> bytes:
    if low.size <= _ARRAY_LIMIT:
        return low.tobytes()
    bits = np.zeros(1 << 16, np.uint8)
    bits[low] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def decode_positions(data: bytes) -> Positions:
    """Parse row numbers, ascending. Raises `ValueError` unless `data` is exactly one valid set."""
    source = _Source(data)
    if source.number("<I") != _MAGIC:
        raise ValueError("not a bitmap in the portable format")
    buckets = [np.empty(0, np.int64)]
    for _ in range(source.number("<Q")):
        key = source.number("<I")
        buckets.append(_decode_bucket(source) + (np.int64(key) << 32))
    if source.at != len(data):
        raise ValueError("a bitmap with trailing bytes")
    found = np.concatenate(buckets)
    if found.size > 1 and not bool(np.all(found[1:] > found[:-1])):
        raise ValueError("a bitmap whose numbers are not in order")
    return found


class _Source:
    """Bytes with a read position."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, length: int) -> bytes:
        piece = self.data[self.at : self.at + length]
        if len(piece) != length:
            raise ValueError("a truncated bitmap")
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
        runs = np.unpackbits(np.frombuffer(source.take((count + 7) // 8), np.uint8), bitorder="little")[
            :count
        ].astype(bool)
    elif cookie == _PLAIN_COOKIE:
        count = source.number("<I")
        if count > 1 << 16:
            raise ValueError("a bitmap with too many containers")
        runs = np.zeros(count, bool)
    else:
        raise ValueError("a bitmap of unknown kind")
    descriptions = source.shorts(2 * count).reshape(count, 2)
    if not has_runs or count >= _OFFSETS_FROM:
        source.take(4 * count)  # offsets are not needed: containers follow one another
    parts = [np.empty(0, np.int64)]
    for (key, fewer), is_run in zip(descriptions.tolist(), runs.tolist(), strict=True):
        low = _decode_runs(source) if is_run else _decode_container(source, fewer + 1)
        if low.size != fewer + 1:
            raise ValueError("a container with a wrong count")
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


_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_DIGITS = {letter: digit for digit, letter in enumerate(_ALPHABET)}
_UUID_LETTERS = 20
_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class DeletionVector:
    """The location of a vector, as in the log."""

    storage: str
    """`u`: in a file named by a UUID; `p`: in a file named by its path; `i`: inline."""
    place: str
    offset: int | None
    bytes: int
    count: int

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Self:
        return cls(
            found["storageType"],
            found["pathOrInlineDv"],
            found.get("offset"),
            found["sizeInBytes"],
            found["cardinality"],
        )

    @property
    def identity(self) -> str:
        """A text that, together with the path of the data file, identifies one state of that file."""
        return f"{self.storage}{self.place}" + ("" if self.offset is None else f"@{self.offset}")

    def document(self) -> dict[str, object]:
        offset = {} if self.offset is None else {"offset": self.offset}
        return {
            "storageType": self.storage,
            "pathOrInlineDv": self.place,
            **offset,
            "sizeInBytes": self.bytes,
            "cardinality": self.count,
        }


def load_vector(root: Path, vector: DeletionVector) -> Positions:
    """The rows that `vector` removes, in the table at `root`."""
    try:
        data = (
            _z85_decode(vector.place)[: vector.bytes] if vector.storage == "i" else _load_data(root, vector)
        )
        positions = decode_positions(data)
    except FileNotFoundError as error:
        raise TargetFileLostError(f"the file {error.filename} of the target is missing") from error
    except (OSError, ValueError) as error:
        raise SinkError(f"a deletion vector of the Delta table at {root} cannot be read: {error}") from error
    if positions.size != vector.count:
        raise SinkError(
            f"a deletion vector of the Delta table at {root} has {positions.size} rows, but the log says "
            f"{vector.count}"
        )
    return positions


def _load_data(root: Path, vector: DeletionVector) -> bytes:
    with storage.open_input(vector_file(root, vector)) as file:
        if file.read(1) != bytes([_FORMAT_VERSION]):
            raise ValueError("a file in another format")
        file.seek(vector.offset or 0)
        data = file.read(vector.bytes + 8)
    if len(data) != vector.bytes + 8:
        raise ValueError("a truncated file")
    length, checksum = struct.unpack(">I", data[:4])[0], struct.unpack(">I", data[-4:])[0]
    if length != vector.bytes or checksum != zlib.crc32(data[4:-4]):
        raise ValueError("it is damaged")
    return data[4:-4]


def vector_file(root: Path, vector: DeletionVector) -> Path:
    return table_file(root, vector_name(vector))


def vector_name(vector: DeletionVector) -> str:
    """The path of the vector's file, in the form of paths in a log."""
    if vector.storage == "u":
        prefix, name = vector.place[:-_UUID_LETTERS], vector.place[-_UUID_LETTERS:]
        return quote(str(Path(prefix, f"deletion_vector_{UUID(bytes=_z85_decode(name))}.bin")))
    if vector.storage == "p":
        return vector.place
    raise ValueError(f"a vector of kind {vector.storage!r}")


def write_vectors(
    root: Path, positions: Iterable[tuple[str, Positions]], attempt: str | None = None
) -> dict[str, DeletionVector]:
    """Write one vector for each path in `positions` to a new file of the table at `root`. The file is
    durable, but its directory entry is not.

    `attempt`, 16 hexadecimal digits, becomes the start of the file's name (see `remove_vectors`).
    """
    name = uuid4() if attempt is None else UUID(hex=attempt + secrets.token_hex(8))
    parts = [bytes([_FORMAT_VERSION])]
    vectors: dict[str, DeletionVector] = {}
    at = 1
    for path, rows in positions:
        data = encode_positions(rows)
        vectors[path] = DeletionVector("u", z85_encode(name.bytes), at, len(data), distinct(rows).size)
        parts += (struct.pack(">I", len(data)), data, struct.pack(">I", zlib.crc32(data)))
        at += len(data) + 8
    if vectors:
        file = root / f"deletion_vector_{name}.bin"
        with removed_on_failure(file):
            storage.write(file, b"".join(parts), shared=True)
    return vectors


def remove_vectors(root: Path, attempt: str) -> None:
    """Remove the files that `write_vectors` wrote for an attempt that did not reach its commit."""
    begin = str(UUID(hex=attempt.ljust(32, "0")))[:18]
    for file in storage.list_paths(root, f"deletion_vector_{begin}-*.bin"):
        storage.delete(file)


def z85_encode(data: bytes) -> str:
    """Encode four bytes as five characters; the end is padded with zeros."""
    words = struct.unpack(f">{(len(data) + 3) // 4}I", data + bytes(-len(data) % 4))
    return "".join(_ALPHABET[word // 85**power % 85] for word in words for power in range(4, -1, -1))


def _z85_decode(text: str) -> bytes:
    if len(text) % 5 or not _DIGITS.keys() >= set(text):
        raise ValueError("invalid Z85")
    words = []
    for at in range(0, len(text), 5):
        word = 0
        for letter in text[at : at + 5]:
            word = word * 85 + _DIGITS[letter]
        words.append(word)
    try:
        return struct.pack(f">{len(words)}I", *words)
    except struct.error as error:
        raise ValueError("invalid Z85") from error
