"""Keys that a table had at the previous poll, stored in a file. Deletes are detected by comparing the current
keys with them.

One file per table, sorted by a hash of the key that the server computes. So two polls are compared by a
merge, some thousand keys at a time. In most polls no key was added or removed: keys are first compared with
the old file row by row, and a new file is begun only at the first difference, starting with the equal part. A
file has the position of its poll in its name, like the mark; the previous file is kept until the new mark is
durable. A poll with equal keys continues to use the previous file.

File columns are named after the key columns: if the key changes, the files cannot be compared and count as
lost.

A copy of the table is a poll too. A row that is inserted after one poll, copied, and deleted before the next
is in neither file. So the keys of a copy are stored too, until a poll that has read them is confirmed.
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

from penstock import storage
from penstock.errors import SpoolError
from penstock.position import Position
from penstock.schema import TableSchema

_BATCH_ROWS = 65_536


class KeyFile:
    """A file being written; `before` is the file to compare with. Call `finish` to keep it, and `close` in
    any case.
    """

    def __init__(self, path: Path, schema: pa.Schema, before: Path | None = None) -> None:
        self._path = path
        self._schema = schema
        self._before = before
        self._known = None if before is None else _Rows(before)
        self._same_rows = 0
        self._writer: pq.ParquetWriter | None = None

    def write(self, columns: list[pa.Array]) -> None:
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        if self._known is not None:
            if self._known.take(batch.num_rows).equals(pa.Table.from_batches([batch])):
                self._same_rows += batch.num_rows
                return
            self._take_over()
        self._open().write_batch(batch)

    def finish(self) -> None:
        """Make the file durable. If all keys were equal, no file is written."""
        if self._known is not None:
            if not self._known.take(1).num_rows:
                return
            self._take_over()
        self._open()
        self.close()
        storage.sync_file(self._path)

    def close(self) -> None:
        if self._known is not None:
            self._known.close()
            self._known = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> pq.ParquetWriter:
        if self._writer is None:
            storage.ensure_directory(self._path.parent)
            storage.ensure_file(self._path)
            self._writer = pq.ParquetWriter(self._path, self._schema)
        return self._writer

    def _take_over(self) -> None:
        """Begin the file with the equal part."""
        assert self._before is not None
        assert self._known is not None
        self._known.close()
        self._known = None
        writer, rows = self._open(), _Rows(self._before)
        try:
            while self._same_rows:
                taken = rows.take(min(self._same_rows, _BATCH_ROWS))
                writer.write_table(taken)
                self._same_rows -= taken.num_rows
        finally:
            rows.close()


class _Rows:
    """The rows of a file, read in batches of a given size."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path)
        self._batches = self._file.iter_batches(_BATCH_ROWS)
        self._held = self._file.schema_arrow.empty_table()

    def take(self, count: int) -> pa.Table:
        """The next `count` rows; fewer only at the end of the file."""
        while self._held.num_rows < count and (batch := next(self._batches, None)) is not None:
            self._held = pa.concat_tables([self._held, pa.Table.from_batches([batch])])
        taken, self._held = self._held.slice(0, count), self._held.slice(count)
        return taken

    def close(self) -> None:
        self._file.close()


_FILE = re.compile(r"(\d+)-([0-9A-F]{16})\.parquet")
_COPIED = re.compile(r"(\d+)-([0-9A-F]{16})\.copied")

KeyTexts = list[pa.StringArray]
"""A hash, the key as one text, and a text for each of its columns."""


class KnownKeys:
    """The files of one capture. Used by its thread; `store` and `store_copied` also by others."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def has(self, table: TableSchema, position: Position) -> bool:
        """Whether the keys of that poll exist, with the table's current key columns."""
        return _is_of(self._path(table.oid, position), table)

    def store(self, table: TableSchema, position: Position, keys: Iterator[KeyTexts]) -> None:
        """Store these keys durably."""
        for _ in self.compare(table, None, keys):
            pass
        self.adopt(table.oid, position)

    def compare(
        self,
        table: TableSchema,
        before: Position | None,
        keys: Iterator[KeyTexts],
        *,
        keeps_same: bool = False,
    ) -> Iterator[KeyTexts]:
        """Yield the keys of the poll at `before` that are not among `keys`. At the end `keys` are ready for
        `adopt`; equal keys are stored only with `keeps_same`.
        """
        storage.delete(self._new(table.oid))
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
        """Store the keys in a copy at `position`, durably. Any process may call it while no poll runs."""
        path = self._copied(table.oid, position)
        with _failing(), ExitStack() as stack:
            file = KeyFile(path.with_suffix(".tmp"), _schema(table))
            stack.callback(file.close)
            _Kept(keys, file).finish()
        storage.rename(path.with_suffix(".tmp"), path)
        storage.sync_directory(self._directory)

    def copies(self, table: TableSchema, after: Position | None, before: Position) -> list[Position]:
        """The positions of copies between two polls whose keys have the table's current key columns. Some may
        be later, since a poll takes time.
        """
        found = [
            position
            for oid, position in self._list(_COPIED)
            if oid == table.oid and (after or Position.ZERO) < position < before
        ]
        return [position for position in found if _is_of(self._copied(table.oid, position), table)]

    def compare_copy(self, table: TableSchema, copy: Position, before: Position | None) -> Iterator[KeyTexts]:
        """Yield the keys of a copy that neither the last stored poll nor the poll at `before` has."""
        with _failing(), ExitStack() as stack:
            paths = [self._new(table.oid), *([self._path(table.oid, before)] if before is not None else [])]
            others = [_Kept(_batches(stack, path), None) for path in paths]
            for texts in _batches(stack, self._copied(table.oid, copy)):
                upto = texts[0][-1].as_py()
                is_known = functools.reduce(
                    pc.or_, [pc.is_in(texts[1], other.upto(upto)) for other in others]
                )
                gone = [text.filter(pc.invert(is_known)) for text in texts]
                if len(gone[0]):
                    yield [column.cast(pa.string()) for column in gone]

    def forget_copies(self, known: Mapping[int, Position]) -> None:
        """Delete the copies before a confirmed poll of these tables."""
        for oid, position in self._list(_COPIED):
            if oid in known and position <= known[oid]:
                storage.delete(self._copied(oid, position))

    def adopt(self, oid: int, position: Position) -> bool:
        """Make the last compared keys those of the poll at `position`, durably. False if they equal those of
        the previous poll.
        """
        if storage.file_version(self._new(oid)) is None:
            return False
        storage.rename(self._new(oid), self._path(oid, position))
        storage.sync_directory(self._directory)
        return True

    def keep_only(self, kept: Mapping[int, Position]) -> None:
        """Delete the files of these tables, except those of the given polls."""
        for oid, position in self._list(_FILE):
            if position != kept.get(oid, position):
                storage.delete(self._path(oid, position))

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
    return pa.schema(
        [pa.field(name, pa.string() if at else pa.int64()) for at, name in enumerate(_names(table))]
    )


def _is_of(path: Path, table: TableSchema) -> bool:
    try:
        return storage.exists(path) and pq.read_schema(path).names == _names(table)
    except (OSError, pa.ArrowException):
        return False


def _batches(stack: ExitStack, path: Path) -> Iterator[KeyTexts]:
    """The non-empty batches of a file, which stays open until `stack` is closed."""
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
    """Incoming keys: written to a file if there is one, and kept in memory until the merge has
    passed them.
    """

    def __init__(self, keys: Iterator[KeyTexts], file: KeyFile | None) -> None:
        self._keys = keys
        self._file = file
        self._numbers = pa.array([], pa.int64())
        self._wholes = pa.array([], pa.string())
        self._is_over = False

    def upto(self, number: int) -> pa.StringArray:
        """All keys with a hash of at most `number`, and perhaps some more, without those returned before."""
        while not self._is_over and (not len(self._numbers) or self._numbers[-1].as_py() <= number):
            self._read()
        wholes = self._wholes
        ahead = pc.greater_equal(self._numbers, number)
        self._numbers, self._wholes = self._numbers.filter(ahead), self._wholes.filter(ahead)
        return wholes

    def finish(self) -> None:
        """Write the remaining keys."""
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
