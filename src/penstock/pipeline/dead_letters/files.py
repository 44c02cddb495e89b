"""Files of dead letters: the rejected changes in the format of the spool, and the compaction of small files.

Every epoch of a table reads the table's open dead letters, and a replay applies their changes from
`_changes`. So the thread that applies the table's epochs also compacts the files with open dead letters. It
first writes a plan. If a crash interrupts the compaction, the next run completes it from the plan.

Files whose dead letters are all settled (superseded or replayed) are kept only for operators. Maintenance
compacts them, and deletes dead letters after their retention. During a compaction a reader may see a dead
letter twice; `without_duplicates` removes the duplicate.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock import storage
from penstock.change import (
    CHANGE_TYPE,
    COMMIT_VERSION,
    ORDINAL,
    UNCHANGED,
    ChangeCounts,
    ChangeType,
    metadata_index,
)
from penstock.errors import SpoolCorruptError
from penstock.pipeline.dead_letters.rejections import DEAD_LETTER_SCHEMA, DeadLetterStatus, Name
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.spool.manifest import SegmentFile, parse_schema, schema_document
from penstock.spool.reader import FileSlice

_SCHEMA = b"penstock.table"


def write_durably(path: Path, rows: pa.Table) -> None:
    with storage.open_new(path) as file:
        pq.write_table(rows, file)
    storage.sync_file(path)


def write_changes(path: Path, schema: TableSchema, batches: list[pa.RecordBatch]) -> None:
    """Write `batches`, which have the format of the spool, with the table's schema in the file's metadata."""
    rows = pa.Table.from_batches(batches)
    write_durably(path, rows.replace_schema_metadata({_SCHEMA: json.dumps(schema_document(schema)).encode()}))


def shape_of(path: Path) -> bytes:
    """Return the serialised table schema of a file. Files with different schemas cannot be merged."""
    return bytes((pq.read_schema(path).metadata or {}).get(_SCHEMA, b""))


def read_changes(path: Path) -> tuple[TableSchema, pa.Table]:
    """Read a file that `write_changes` wrote. Returns the table's schema and the rows."""
    try:
        with pq.ParquetFile(path) as file:
            schema = parse_schema(json.loads((file.schema_arrow.metadata or {})[_SCHEMA]))
            return schema, file.read()
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        hint = (
            "restore the file; without it these dead letters cannot be replayed, and the table needs "
            "`penstock tables resync CONFIG TABLE`"
        )
        raise SpoolCorruptError(f"{path} cannot be read", hint=hint) from error


def load_slice(path: Path, wanted: Collection[Name] | None, end: Position) -> FileSlice:
    """Load dead letters of a file as changes at position `end`. The original position of a dead letter is
    before the target's applied position, so with that position the target would skip it. `wanted`: the dead
    letters to load; None for all.
    """
    schema, rows = read_changes(path)
    kinds, unchanged, versions, ordinals = (
        rows.column(metadata_index(schema, name))
        for name in (CHANGE_TYPE, UNCHANGED, COMMIT_VERSION, ORDINAL)
    )
    names = list(zip(versions.to_pylist(), ordinals.to_pylist(), strict=True))
    counts = ChangeCounts(
        inserts=pc.sum(pc.equal(kinds, ChangeType.INSERT.value)).as_py() or 0,
        updates=pc.sum(pc.not_equal(kinds, ChangeType.INSERT.value)).as_py() or 0,
        unchanged=len(unchanged) - unchanged.null_count,
        inexact=rows.num_rows,
        unreadable=rows.num_rows,
    )
    file_of = SegmentFile(schema, path.name, rows.num_rows, storage.size_bytes(path), counts, end, end)
    return FileSlice(
        path.absolute(),
        file_of,
        None,
        None,
        frozenset(name for name in names if wanted is not None and name not in wanted),
    )


def exclude(slice: FileSlice, names: Collection[Name]) -> FileSlice:
    """Return the slice without the changes `names`."""
    low, high = slice.file.min_position.value, slice.file.max_position.value
    within = frozenset(name for name in names if low <= name[0] <= high)
    return replace(slice, excluded=slice.excluded | within) if within else slice


LETTERS_SUFFIX, CHANGES_SUFFIX = ".letters.parquet", ".changes.parquet"
MANY = 32
_SETTLED = "settled-"
_TIMES = ("status", "refused_at", "settled_at")
_LARGE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Compaction:
    """A planned compaction of one table's files. The plan is durable before the first file is changed."""

    into: str
    stems: tuple[str, ...]

    def dump(self) -> bytes:
        return json.dumps({"into": self.into, "stems": list(self.stems)}).encode()

    @classmethod
    def parse(cls, data: bytes, where: Path) -> Compaction:
        try:
            document = json.loads(data)
            return cls(document["into"], tuple(document["stems"]))
        except (ValueError, KeyError, TypeError) as error:
            raise SpoolCorruptError(
                f"{where} has invalid content",
                hint="restore the file; it contains a planned compaction of dead letters",
            ) from error


@dataclass(frozen=True, slots=True)
class DeadLetterCompactor:
    """Compacts the files of a pipeline's dead letters."""

    directory: Path
    many: int = MANY
    """Minimum number of files to compact."""

    @property
    def _pending(self) -> Path:
        return self.directory / "_pending"

    @property
    def _changes(self) -> Path:
        return self.directory / "_changes"

    def compact_open(self, files: Mapping[str, set[Name]], into: str) -> Compaction | None:
        """Merge files with open dead letters of a table into one file with the stem `into`. Merges the
        longest run of files that have the same schema and are adjacent in commit order. `files`: the open
        dead letters by file stem.

        Returns the compaction; None if no two adjacent files have the same schema.
        """
        stems = sorted(files, key=lambda stem: min(files[stem]))
        runs = [
            list(run) for _, run in groupby(stems, lambda stem: shape_of(self._changes / f"{stem}.parquet"))
        ]
        run = max(runs, key=len)
        if len(run) < 2:
            return None
        storage.ensure_directory(self._pending)
        schema, batches = None, []
        for stem in run:
            schema, rows = read_changes(self._changes / f"{stem}.parquet")
            places = (metadata_index(schema, name) for name in (COMMIT_VERSION, ORDINAL))
            names = zip(*(rows.column(place).to_pylist() for place in places), strict=True)
            batches += rows.filter(pa.array([name in files[stem] for name in names], pa.bool_())).to_batches()
        assert schema is not None
        changes, letters = (self._pending / f"{into}{suffix}" for suffix in (CHANGES_SUFFIX, LETTERS_SUFFIX))
        compaction = Compaction(into, tuple(run))
        try:
            write_changes(changes, schema, batches)
            write_durably(letters, _load(self.directory / f"{stem}.parquet" for stem in run))
            storage.sync_directory(self._pending)
            storage.put(self._document(into), compaction.dump())
        except BaseException:
            if not storage.exists(self._document(into)):  # if it exists, `finish` needs both files
                storage.delete(changes)
                storage.delete(letters)
            raise
        self._finish(compaction)
        return compaction

    def finish_interrupted(self) -> None:
        """Finish compactions that a crash interrupted, and delete temporary files. Called at the start of a
        run.
        """
        for path in (
            *storage.list_paths(self.directory, ".*.tmp"),
            *storage.list_paths(self._pending, "*.tmp"),
        ):
            storage.delete(path)
        self.finish("")

    def finish(self, prefix: str) -> None:
        """Finish the planned compactions whose names start with `prefix`. Skips the steps that an interrupted
        attempt has already executed.
        """
        found = storage.list_paths(self._pending, f"{prefix}*.fold")
        if found:
            storage.sync_directory(self._pending)
        for path in found:
            data = storage.read(path)
            if data is not None:
                self._finish(Compaction.parse(data, path))

    def _finish(self, compaction: Compaction) -> None:
        for suffix, place in ((CHANGES_SUFFIX, self._changes), (LETTERS_SUFFIX, self.directory)):
            source = self._pending / f"{compaction.into}{suffix}"
            if storage.exists(source):
                storage.rename(source, place / f"{compaction.into}.parquet")
                storage.sync_directory(place)
        for stem in compaction.stems:
            storage.delete(self.directory / f"{stem}.parquet")
            storage.delete(self._changes / f"{stem}.parquet")
        storage.delete(self._document(compaction.into))

    def _document(self, into: str) -> Path:
        return self._pending / f"{into}.fold"

    def compact_settled(self, before: datetime, lock: AbstractContextManager[object]) -> None:
        """Compact files of settled dead letters if there are many, and delete dead letters that were settled
        before the time `before`.

        Holds `lock` only while it adds and removes files. The lock keeps other threads from settling a dead
        letter at that moment.
        """
        visible = [
            path for path in storage.list_paths(self.directory, "*.parquet") if not path.name.startswith(".")
        ]
        settled = [each for path in visible if (each := SettledFile.inspect(path, before)) is not None]
        few = [each for each in settled if each.bytes < _LARGE_BYTES]
        single = [each for each in few if not each.path.name.startswith(_SETTLED)]
        if len(single) >= self.many or any(each.old for each in few):
            self._merge_files([each.path for each in few], before, lock)
        forgotten = [each.path for each in settled if each.bytes >= _LARGE_BYTES and each.old == each.rows]
        if forgotten:
            with lock:
                _remove(forgotten)

    def _merge_files(
        self, paths: Sequence[Path], before: datetime, lock: AbstractContextManager[object]
    ) -> None:
        target = self.directory / f"{_SETTLED}{secrets.token_hex(8)}.parquet"
        temporary = target.with_name(f".{target.name}.tmp")
        seen: set[tuple[object, ...]] = set()
        try:
            with storage.open_new(temporary) as file, pq.ParquetWriter(file, DEAD_LETTER_SCHEMA) as writer:
                for path in paths:  # one file at a time: all files together may be large
                    letters = _load([path])
                    writer.write_table(without_duplicates(letters.filter(_since(letters, before)), seen))
            storage.sync_file(temporary)
        except BaseException:
            storage.delete(temporary)  # maintenance retries every minute, so files would accumulate
            raise
        with lock:
            if seen:
                storage.rename(temporary, target)
                storage.sync_directory(self.directory)
            _remove([temporary, *paths])


@dataclass(frozen=True, slots=True)
class SettledFile:
    """A file without open dead letters. Its content never changes."""

    path: Path
    bytes: int
    rows: int
    old: int
    """The number of dead letters in the file that are to be deleted."""

    @classmethod
    def inspect(cls, path: Path, before: datetime) -> SettledFile | None:
        """Inspect a file. Returns None if the file has an open dead letter, or was removed. `before`: dead
        letters that were settled before this time are to be deleted.
        """
        try:
            size = storage.size_bytes(path)
            letters = pq.read_table(path, columns=list(_TIMES), schema=DEAD_LETTER_SCHEMA, partitioning=None)
        except FileNotFoundError:
            return None
        if pc.any(pc.equal(letters.column("status"), DeadLetterStatus.OPEN.value)).as_py():
            return None
        return cls(
            path, size, letters.num_rows, letters.num_rows - (pc.sum(_since(letters, before)).as_py() or 0)
        )


def without_duplicates(letters: pa.Table, seen: set[tuple[object, ...]] | None = None) -> pa.Table:
    """Return the dead letters without duplicates and without those in `seen`. Adds the returned ones to
    `seen`.
    """
    seen = set() if seen is None else seen
    wanted = []
    for name in zip(
        *(letters.column(each).to_pylist() for each in ("table", "commit_version", "ordinal")), strict=True
    ):
        wanted.append(name not in seen)
        seen.add(name)
    return letters if all(wanted) else letters.filter(pa.array(wanted))


def _load(paths: Iterable[Path]) -> pa.Table:
    found = [pq.read_table(path, schema=DEAD_LETTER_SCHEMA, partitioning=None) for path in paths]
    return pa.concat_tables([DEAD_LETTER_SCHEMA.empty_table(), *found])


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        storage.delete(path)


def _since(letters: pa.Table, before: datetime) -> pa.Array:
    """Mask of the dead letters that were settled at `before` or later."""
    settled = pc.coalesce(letters.column("settled_at"), letters.column("refused_at"))
    return pc.greater_equal(settled, pa.scalar(before, pa.timestamp("us", "UTC")))
