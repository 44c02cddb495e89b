"""Deletion vectors: which rows of a file of a Delta table are gone, in the log or in files beside the data.

A file of vectors holds one for each data file that a commit touches, each with its length before it and its CRC-32 behind it, big-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote
from uuid import UUID, uuid4

from penstock.errors import SinkError, TargetFileLostError
from penstock.postgres.types.arrays import distinct
from penstock.sinks.delta.paths import table_file
from penstock.sinks.delta.roaring import Positions, decode_positions, encode_positions
from penstock.sinks.row_files import removed_on_failure
from penstock.spool import storage

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_DIGITS = {letter: digit for digit, letter in enumerate(_ALPHABET)}
_UUID_LETTERS = 20
_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class DeletionVector:
    """Where a vector is to be found, as the log says it."""

    storage: str
    """`u`: in a file named by a UUID; `p`: in a file named by its path; `i`: right here."""
    place: str
    offset: int | None
    bytes: int
    count: int

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Self:
        return cls(found["storageType"], found["pathOrInlineDv"], found.get("offset"), found["sizeInBytes"], found["cardinality"])

    @property
    def identity(self) -> str:
        """With the file's path this tells one state of a file from the next."""
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
    """The rows that `vector`, of the table at `root`, says are gone."""
    try:
        data = _z85_decode(vector.place)[: vector.bytes] if vector.storage == "i" else _load_data(root, vector)
        positions = decode_positions(data)
    except FileNotFoundError as error:
        raise TargetFileLostError(f"the file {error.filename} of the target is missing") from error
    except (OSError, ValueError) as error:
        raise SinkError(f"a deletion vector of the Delta table at {root} cannot be read: {error}") from error
    if positions.size != vector.count:
        raise SinkError(f"a deletion vector of the Delta table at {root} holds {positions.size} rows, and the log says {vector.count}")
    return positions


def _load_data(root: Path, vector: DeletionVector) -> bytes:
    with vector_file(root, vector).open("rb") as file:
        if file.read(1) != bytes([_FORMAT_VERSION]):
            raise ValueError("a file of another format")
        file.seek(vector.offset or 0)
        data = file.read(vector.bytes + 8)
    if len(data) != vector.bytes + 8:
        raise ValueError("a file that is cut off")
    length, checksum = struct.unpack(">I", data[:4])[0], struct.unpack(">I", data[-4:])[0]
    if length != vector.bytes or checksum != zlib.crc32(data[4:-4]):
        raise ValueError("it is damaged")
    return data[4:-4]


def vector_file(root: Path, vector: DeletionVector) -> Path:
    return table_file(root, vector_name(vector))


def vector_name(vector: DeletionVector) -> str:
    """The path of the file that holds it, as a log writes paths."""
    if vector.storage == "u":
        prefix, name = vector.place[:-_UUID_LETTERS], vector.place[-_UUID_LETTERS:]
        return quote(str(Path(prefix, f"deletion_vector_{UUID(bytes=_z85_decode(name))}.bin")))
    if vector.storage == "p":
        return vector.place
    raise ValueError(f"a vector of the kind {vector.storage!r}")


def write_vectors(root: Path, positions: Iterable[tuple[str, Positions]]) -> dict[str, DeletionVector]:
    """Write one vector for each path in `positions`, all in one new file of the table at `root`, durably but for the directory."""
    name = uuid4()
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
            storage.write_bytes(file, b"".join(parts), shared=True)
    return vectors


def z85_encode(data: bytes) -> str:
    """Four bytes to five letters; what is shorter is filled up with zeros."""
    words = struct.unpack(f">{(len(data) + 3) // 4}I", data + bytes(-len(data) % 4))
    return "".join(_ALPHABET[word // 85**power % 85] for word in words for power in range(4, -1, -1))


def _z85_decode(text: str) -> bytes:
    if len(text) % 5 or not _DIGITS.keys() >= set(text):
        raise ValueError("text that is not Z85")
    words = []
    for at in range(0, len(text), 5):
        word = 0
        for letter in text[at : at + 5]:
            word = word * 85 + _DIGITS[letter]
        words.append(word)
    try:
        return struct.pack(f">{len(words)}I", *words)
    except struct.error as error:
        raise ValueError("text that is not Z85") from error
