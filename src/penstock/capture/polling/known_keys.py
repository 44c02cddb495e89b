"""Files with the keys that each table had at its previous poll. Deletes are detected by comparing the current
keys with them.

There is one file per table. Its keys are sorted by a hash that the server computes, so a merge compares two
polls, some thousand keys at a time. In most polls no key was added or removed, so the keys are first compared
with the old file row by row. A new file is created only at the first difference, and begins with a copy of
the equal keys. The name of a file contains the position of its poll. The previous file is kept until the mark
of the new poll is durable. A poll that finds the same keys continues to use the previous file.

The columns of a file are named after the key columns of the table. If the key changes, the file cannot be
compared, and is treated as lost.

A copy of a table (a snapshot) counts as a poll. A row that is inserted after one poll, copied, and deleted
before the next poll is in the file of neither poll. So the keys of a copy are stored too, until a poll that
has compared them is confirmed.
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
    """Writes the keys of one poll to a file, unless they equal the keys in the file `before`. The caller must
    call `finish` to keep the file, and `close` in any case.
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
        """Make the file durable. No file is written if all keys equal those in the file `before`."""
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
        """Begin the new file with the keys that were equal so far, copied from the file `before`."""
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
    """Reads the rows of a key file, as many at a time as the caller asks for."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path)
        self._batches = self._file.iter_batches(_BATCH_ROWS)
        self._held = self._file.schema_arrow.empty_table()

    def take(self, count: int) -> pa.Table:
        """Return the next `count` rows; fewer only at the end of the file."""
        while self._held.num_rows < count and (batch := next(self._batches, None)) is not None:
            self._held = pa.concat_tables([self._held, pa.Table.from_batches([batch])])
        taken, self._held = self._held.slice(0, count), self._held.slice(count)
        return taken

    def close(self) -> None:
        self._file.close()


_FILE = re.compile(r"(\d+)-([0-9A-F]{16})\.parquet")
_COPIED = re.compile(r"(\d+)-([0-9A-F]{16})\.copied")

KeyTexts = list[pa.StringArray]
"""A batch of keys as columns of text: a hash, the whole key as one text, and one column for each key column.
"""


class KnownKeys:
    """The key files of one capture. Used by the capture thread; other threads and processes call only `store`
    and `store_copied`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def has(self, table: TableSchema, position: Position) -> bool:
        """Whether the keys that the table had at the poll at `position` are stored, with the table's current
        key columns.
        """
        return _is_of(self._path(table.oid, position), table)

    def store(self, table: TableSchema, position: Position, keys: Iterator[KeyTexts]) -> None:
        """Store `keys` durably as those of the poll at `position`."""
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
        """Yield the keys of the poll at `before` that are not among `keys`. When the iterator is exhausted,
        `keys` are in a temporary file that `adopt` keeps. If `keys` equal those of the poll at `before`, the
        file is written only with `keeps_same`.
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
        """Store the keys that a copy at `position` contains, durably. Any process may call it while no poll
        runs.
        """
        path = self._copied(table.oid, position)
        with _failing(), ExitStack() as stack:
            file = KeyFile(path.with_suffix(".tmp"), _schema(table))
            stack.callback(file.close)
            _Kept(keys, file).finish()
        storage.rename(path.with_suffix(".tmp"), path)
        storage.sync_directory(self._directory)

    def copies(self, table: TableSchema, after: Position | None, before: Position) -> list[Position]:
        """Return the positions of the table's copies between `after` and `before`, the positions of two
        polls. A copy counts only if its keys were stored under the table's current key columns. A copy may
        also be later than a poll that is still running: the next poll compares its keys.
        """
        found = [
            position
            for oid, position in self._list(_COPIED)
            if oid == table.oid and (after or Position.ZERO) < position < before
        ]
        return [position for position in found if _is_of(self._copied(table.oid, position), table)]

    def compare_copy(self, table: TableSchema, copy: Position, before: Position | None) -> Iterator[KeyTexts]:
        """Yield the keys of the copy at `copy` that are neither in the temporary file of the last `compare`
        nor among the keys of the poll at `before`.
        """
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
        """Delete the keys of copies that a confirmed poll has compared. `known` contains the position of that
        poll for each table, by OID.
        """
        for oid, position in self._list(_COPIED):
            if oid in known and position <= known[oid]:
                storage.delete(self._copied(oid, position))

    def adopt(self, oid: int, position: Position) -> bool:
        """Keep the temporary file of the last `compare`, durably, as the keys of the poll at `position`.
        Returns False if there is none, since the keys equal those of the previous poll.
        """
        if storage.file_version(self._new(oid)) is None:
            return False
        storage.rename(self._new(oid), self._path(oid, position))
        storage.sync_directory(self._directory)
        return True

    def keep_only(self, kept: Mapping[int, Position]) -> None:
        """Delete all key files of the tables in `kept`, except those of the given polls. `kept` contains the
        position of a poll for each table, by OID.
        """
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
    """Yield the non-empty batches of a file, which stays open until `stack` is closed."""
    file = stack.enter_context(pq.ParquetFile(path))
    return (batch.columns for batch in file.iter_batches(_BATCH_ROWS) if batch.num_rows)


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        # Arrow may quote a value in its message, so only the class of the error is shown.
        raise SpoolError(f"the keys of a table cannot be kept or read: {type(error).__name__}") from error


class _Kept:
    """Reads incoming keys for a merge. Keys are kept in memory until the merge has passed them, and are
    written to `file` if it is given.
    """

    def __init__(self, keys: Iterator[KeyTexts], file: KeyFile | None) -> None:
        self._keys = keys
        self._file = file
        self._numbers = pa.array([], pa.int64())
        self._wholes = pa.array([], pa.string())
        self._is_over = False

    def upto(self, number: int) -> pa.StringArray:
        """Return all keys whose hash is at most `number`, and possibly some with a greater hash. Keys with a
        hash below the `number` of the previous call are left out.
        """
        while not self._is_over and (not len(self._numbers) or self._numbers[-1].as_py() <= number):
            self._read()
        wholes = self._wholes
        ahead = pc.greater_equal(self._numbers, number)
        self._numbers, self._wholes = self._numbers.filter(ahead), self._wholes.filter(ahead)
        return wholes

    def finish(self) -> None:
        """Write the remaining keys, and finish the file."""
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
