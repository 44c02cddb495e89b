"""The keys that a table had at an earlier look, for captures that learn of deletes by comparing.

A file for each table, sorted by a number that the server makes of the key: so two looks are compared side by side, some thousand keys at a
time, however many there are. It is named after the look that it is of, as the mark is that goes with it; the one before stays until that
mark is durable. A look that finds the same keys goes on with the file of the look before. Columns are named after those of the key: keys
of another kind are not comparable, and as good as lost.

A copy of the table is a look too, of which only the copy knows: a row that comes after one look, is copied, and goes before the next, is in
no file of the two. So the keys of a copy are kept beside them, until a look that knows of them is confirmed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.capture.key_file import KeyFile
from penstock.errors import SpoolError
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.spool import storage

_FILE = re.compile(r"(\d+)-([0-9A-F]{16})\.parquet")
_COPIED = re.compile(r"(\d+)-([0-9A-F]{16})\.copied")
_BATCH_ROWS = 65_536

KeyTexts = list[pa.StringArray]
"""A number, the key in one text, and a text for each of its columns."""


class KnownKeys:
    """The files of one capture. For its one thread, but for `store`, with which a table begins."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def has(self, table: TableSchema, position: Position) -> bool:
        """Whether the keys of that look are there, and are such as the table has now."""
        return _is_of(self._path(table.oid, position), table)

    def store(self, table: TableSchema, position: Position, keys: Iterator[KeyTexts]) -> None:
        """Keep all of these, durably."""
        for _ in self.compare(table, None, keys):
            pass
        self.adopt(table.oid, position)

    def compare(
        self, table: TableSchema, before: Position | None, keys: Iterator[KeyTexts], *, keeps_same: bool = False
    ) -> Iterator[KeyTexts]:
        """Give out the keys of the look at `before` that are not among `keys`.

        These are kept for `adopt`, once this is at its end; if they are those of `before`, only with `keeps_same`.
        """
        storage.remove_file(self._new(table.oid))
        held = None if before is None else self._path(table.oid, before)
        with _failing(), ExitStack() as stack:
            file = KeyFile(self._new(table.oid), _schema(table), None if keeps_same else held)
            stack.callback(file.close)
            new = _Kept(keys, file)
            for texts in _batches(stack, held) if held is not None else ():
                is_gone = pc.invert(pc.is_in(texts[1], new.upto(texts[0][-1].as_py())))
                gone = [text.filter(is_gone) for text in texts]
                if len(gone[0]):
                    yield [column.cast(pa.string()) for column in gone]
            new.finish()

    def store_copied(self, table: TableSchema, position: Position, keys: Iterator[KeyTexts]) -> None:
        """Keep those that a copy at `position` has, durably. From any process, while nobody looks."""
        path = self._copied(table.oid, position)
        with _failing(), ExitStack() as stack:
            file = KeyFile(path.with_suffix(".tmp"), _schema(table))
            stack.callback(file.close)
            _Kept(keys, file).finish()
        storage.rename(path.with_suffix(".tmp"), path)
        storage.sync_directory(self._directory)

    def copies(self, table: TableSchema, after: Position | None, before: Position) -> list[Position]:
        """Of which copies between two looks there are keys such as the table has now. Some may be later: a look takes its time."""
        found = [position for oid, position in self._list(_COPIED) if oid == table.oid and (after or Position.ZERO) < position < before]
        return [position for position in found if _is_of(self._copied(table.oid, position), table)]

    def compare_copy(self, table: TableSchema, copy: Position, before: Position | None) -> Iterator[KeyTexts]:
        """Give out the keys of a copy that are neither among those that were kept last, nor among those of the look at `before`."""
        with _failing(), ExitStack() as stack:
            paths = [self._new(table.oid), *([self._path(table.oid, before)] if before is not None else [])]
            others = [_Kept(_batches(stack, path), None) for path in paths]
            for texts in _batches(stack, self._copied(table.oid, copy)):
                upto = texts[0][-1].as_py()
                is_known = functools.reduce(pc.or_, [pc.is_in(texts[1], other.upto(upto)) for other in others])
                gone = [text.filter(pc.invert(is_known)) for text in texts]
                if len(gone[0]):
                    yield [column.cast(pa.string()) for column in gone]

    def forget_copies(self, known: Mapping[int, Position]) -> None:
        """Of tables of which a look is known for good: the copies before it."""
        for oid, position in self._list(_COPIED):
            if oid in known and position <= known[oid]:
                storage.remove_file(self._copied(oid, position))

    def adopt(self, oid: int, position: Position) -> bool:
        """Make what was compared last the keys of the look at `position`, durably. False if they are those of the look before."""
        if storage.mark(self._new(oid)) is None:
            return False
        storage.rename(self._new(oid), self._path(oid, position))
        storage.sync_directory(self._directory)
        return True

    def keep_only(self, kept: Mapping[int, Position]) -> None:
        """Of these tables, remove the files of all other looks."""
        for oid, position in self._list(_FILE):
            if position != kept.get(oid, position):
                storage.remove_file(self._path(oid, position))

    def _list(self, pattern: re.Pattern[str]) -> list[tuple[int, Position]]:
        matches = map(pattern.fullmatch, storage.list_files(self._directory))
        return [(int(match[1]), Position.of(int(match[2], 16))) for match in matches if match is not None]

    def _new(self, oid: int) -> Path:
        return self._directory / f"{oid}.new"

    def _path(self, oid: int, position: Position) -> Path:
        return self._directory / f"{oid}-{position.value:016X}.parquet"

    def _copied(self, oid: int, position: Position) -> Path:
        return self._directory / f"{oid}-{position.value:016X}.copied"


def _names(table: TableSchema) -> list[str]:
    types = {column.name: column.type_oid for column in table.columns}
    return ["number", "whole", *(f"{name} {types[name]}" for name in table.key)]


def _schema(table: TableSchema) -> pa.Schema:
    return pa.schema([pa.field(name, pa.string() if at else pa.int64()) for at, name in enumerate(_names(table))])


def _is_of(path: Path, table: TableSchema) -> bool:
    try:
        return path.exists() and pq.read_schema(path).names == _names(table)
    except (OSError, pa.ArrowException):
        return False


def _batches(stack: ExitStack, path: Path) -> Iterator[KeyTexts]:
    """Of a file, which is open as long as `stack` is; none of them is empty."""
    file = stack.enter_context(pq.ParquetFile(path))
    return (batch.columns for batch in file.iter_batches(_BATCH_ROWS) if batch.num_rows)


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        # Arrow may quote a value in its message.
        raise SpoolError(f"the keys of a table cannot be kept or read: {type(error).__name__}") from error


class _Kept:
    """Keys as they come: written to a file, if there is one, and held for as long as the other side has not passed them."""

    def __init__(self, keys: Iterator[KeyTexts], file: KeyFile | None) -> None:
        self._keys = keys
        self._file = file
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
        assert self._file is not None
        self._file.finish()

    def _read(self) -> None:
        texts = next(self._keys, None)
        if texts is None:
            self._is_over = True
            return
        numbers = texts[0].cast(pa.int64())
        if self._file is not None:
            self._file.write([numbers, *texts[1:]])
        self._numbers = pa.concat_arrays([self._numbers, numbers])
        self._wholes = pa.concat_arrays([self._wholes, texts[1]])
