"""The keys that a table had at an earlier look, for captures that learn of deletes by comparing.

A file for each table, sorted by a number that the server makes of the key: so two looks are compared side by side, some thousand keys at a
time, however many there are. It is named after the look that it is of, as the mark is that goes with it; the one before stays until that
mark is durable. Its columns are named after those of the key: keys of another kind are not comparable, and as good as lost.
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
from penstock.schema import TableSchema
from penstock.spool import storage

_FILE = re.compile(r"(\d+)-([0-9A-F]{16})\.parquet")
_BATCH_ROWS = 65_536

KeyTexts = list[pa.StringArray]
"""A number, the key in one text, and a text for each of its columns."""


class KnownKeys:
    """The files of one capture. For its one thread, but for `store`, with which a table begins."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def has(self, table: TableSchema, position: Position) -> bool:
        """Whether the keys of that look are there, and are such as the table has now."""
        path = self._path(table.oid, position)
        try:
            return path.exists() and pq.read_schema(path).names == _names(table)
        except (OSError, pa.ArrowException):
            return False

    def store(self, table: TableSchema, position: Position, keys: Iterator[KeyTexts]) -> None:
        """Keep all of these, durably."""
        for _ in self.compare(table, None, keys):
            pass
        self.adopt(table.oid, position)

    def compare(self, table: TableSchema, before: Position | None, keys: Iterator[KeyTexts]) -> Iterator[KeyTexts]:
        """Give out the keys of the look at `before` that are not among `keys`. These are kept for `adopt`, once this is at its end."""
        new = _Kept(keys, self._new(table.oid), _names(table))
        try:
            if before is not None:
                with pq.ParquetFile(self._path(table.oid, before)) as file:
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


def _names(table: TableSchema) -> list[str]:
    types = {column.name: column.type_oid for column in table.columns}
    return ["number", "whole", *(f"{name} {types[name]}" for name in table.key)]


def _of(match: re.Match[str]) -> Position:
    return Position.of(int(match[2], 16))


class _Kept:
    """Keys as they come: written to a file, and held for as long as the other side has not passed them."""

    def __init__(self, keys: Iterator[KeyTexts], path: Path, names: list[str]) -> None:
        self._keys = keys
        self._path = path
        self._schema = pa.schema([pa.field(name, pa.string() if at else pa.int64()) for at, name in enumerate(names)])
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
            self._open()
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
        writer = self._writer or self._open()
        writer.write_batch(pa.RecordBatch.from_arrays([numbers, *texts[1:]], schema=self._schema))
        self._numbers = pa.concat_arrays([self._numbers, numbers])
        self._wholes = pa.concat_arrays([self._wholes, texts[1]])

    def _open(self) -> pq.ParquetWriter:
        storage.make_directory(self._path.parent)
        self._writer = pq.ParquetWriter(self._path, self._schema)
        return self._writer
