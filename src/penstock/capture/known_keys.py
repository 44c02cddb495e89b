"""The keys that a table had at an earlier look, for captures that learn of deletes by comparing.

A file for each table, sorted by a number that the server makes of the key: so two looks are compared side by side, some thousand keys at a
time, however many there are. It is named after the look that it is of, as the mark is that goes with it; the one before stays until that
mark is durable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import SpoolError
from penstock.position import Position
from penstock.spool import storage

_FILE = re.compile(r"(\d+)-([0-9A-F]{16})\.parquet")
_BATCH_ROWS = 65_536

KeyTexts = list[pa.StringArray]
"""A number, the key in one text, and a text for each of its columns."""


class KnownKeys:
    """The files of one capture. For its one thread, but for `store`, with which a table begins."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def has(self, oid: int, position: Position) -> bool:
        return self._path(oid, position).exists()

    def store(self, oid: int, position: Position, keys: Iterator[KeyTexts]) -> None:
        """Keep all of these, durably."""
        for _ in self.compare(oid, None, keys):
            pass
        self.adopt(oid, position)

    def compare(self, oid: int, before: Position | None, keys: Iterator[KeyTexts]) -> Iterator[KeyTexts]:
        """Give out the keys of the look at `before` that are not among `keys`. These are kept for `adopt`, once this is at its end."""
        new = _Kept(keys, self._new(oid))
        try:
            if before is not None:
                with pq.ParquetFile(self._path(oid, before)) as file:
                    for batch in filter(len, file.iter_batches(_BATCH_ROWS)):
                        gone = batch.filter(pc.invert(pc.is_in(batch.column(1), new.upto(batch.column(0)[-1].as_py()))))
                        if gone.num_rows:
                            yield [column.cast(pa.string()) for column in gone.columns]
            new.finish()
        except (OSError, pa.ArrowException) as error:
            # Arrow may quote a value in its message.
            raise SpoolError(f"the keys of a table cannot be kept or read: {type(error).__name__}") from error
        finally:
            new.close()

    def adopt(self, oid: int, position: Position) -> None:
        """Make what was compared last the keys of the look at `position`, durably."""
        storage.rename(self._new(oid), self._path(oid, position))
        storage.sync_directory(self._directory)

    def keep_only(self, kept: Mapping[int, Position]) -> None:
        """Of these tables, remove the files of all other looks."""
        for name in storage.list_files(self._directory):
            match = _FILE.fullmatch(name)
            if match is not None and int(match[2], 16) != kept.get(int(match[1]), _of(match)).value:
                storage.remove_file(self._directory / name)

    def _new(self, oid: int) -> Path:
        return self._directory / f"{oid}.new"

    def _path(self, oid: int, position: Position) -> Path:
        return self._directory / f"{oid}-{position.value:016X}.parquet"


def _of(match: re.Match[str]) -> Position:
    return Position.of(int(match[2], 16))


class _Kept:
    """Keys as they come: written to a file, and held for as long as the other side has not passed them."""

    def __init__(self, keys: Iterator[KeyTexts], path: Path) -> None:
        self._keys = keys
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._numbers = pa.array([], pa.int64())
        self._wholes = pa.array([], pa.string())
        self._is_over = False

    def upto(self, number: int) -> pa.StringArray:
        """All keys whose number is `number` or less, and perhaps some beyond, without those that were passed before."""
        while not self._is_over and (not len(self._numbers) or self._numbers[-1].as_py() <= number):
            self._read()
        wholes = self._wholes
        ahead = pc.greater_equal(self._numbers, number)
        self._numbers, self._wholes = self._numbers.filter(ahead), self._wholes.filter(ahead)
        return wholes

    def finish(self) -> None:
        """Write what is left."""
        while not self._is_over:
            self._read()
            self._numbers, self._wholes = self._numbers[:0], self._wholes[:0]
        if self._writer is None:
            self._open(0)
        self.close()
        storage.sync_file(self._path)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _read(self) -> None:
        texts = next(self._keys, None)
        if texts is None:
            self._is_over = True
            return
        numbers = texts[0].cast(pa.int64())
        writer = self._writer or self._open(len(texts) - 2)
        writer.write_batch(pa.RecordBatch.from_arrays([numbers, *texts[1:]], schema=writer.schema))
        self._numbers = pa.concat_arrays([self._numbers, numbers])
        self._wholes = pa.concat_arrays([self._wholes, texts[1]])

    def _open(self, width: int) -> pq.ParquetWriter:
        storage.make_directory(self._path.parent)
        columns = [pa.field(f"k{at}", pa.string()) for at in range(width)]
        schema = pa.schema([pa.field("number", pa.int64()), pa.field("whole", pa.string()), *columns])
        self._writer = pq.ParquetWriter(self._path, schema)
        return self._writer
