"""The stored dead letters of a pipeline, in `penstock_dead_letters` next to its tables; and the keys that
verify excludes because of them.

The Parquet files of the directory form one table with the schema `DEAD_LETTER_SCHEMA`. The subdirectory
`_changes` has the changes of open dead letters, for replays. A `PendingBatch` lists the dead letters of a
table that an epoch adds and settles. It is durable under `_pending` before the target commits the epoch. It
takes effect if the target reaches the end of the epoch, and is discarded otherwise. The copy of a resync may
be at the same position as the target that it replaces; then the id of the copy decides. So a dead letter is
stored once, and is settled if and only if the target has committed the change that superseded or replayed it.

verify identifies dead letters by key. In a table without a key it cannot distinguish rows with dead letters
from missing rows.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock import storage
from penstock.change import COMMIT_VERSION, EXACT, EXACT_TYPE, ORDINAL
from penstock.errors import RowRefusedError, SnapshotLostError, SpoolCorruptError
from penstock.pipeline.dead_letters.files import (
    CHANGES_SUFFIX,
    LETTERS_SUFFIX,
    MANY,
    DeadLetterCompactor,
    load_slice,
    without_duplicates,
)
from penstock.pipeline.dead_letters.rejections import DEAD_LETTER_SCHEMA, DeadLetterStatus, Name, settled
from penstock.position import Position
from penstock.schema import TableName, TableSchema, is_same_shape
from penstock.sinks.base import DEAD_LETTERS, Target
from penstock.sinks.keys import key_codes
from penstock.spool.reader import FileSlice
from penstock.spool.rows import metadata_column, read_rows

FORMAT = 1
_NAMES = ("table", "status", "commit_version", "ordinal")


@dataclass(frozen=True, slots=True)
class PendingBatch:
    """The dead letters of a table that an epoch adds and settles. The batch is pending until the target has
    committed position `end`.
    """

    table: TableName
    end: Position
    files: tuple[str, ...] = ()
    """New dead letters: stems of files under `_pending`."""
    superseded: Mapping[Name, int] = field(default_factory=dict)
    replayed: frozenset[Name] = frozenset()
    is_resync: bool = False
    """Whether the batch belongs to a snapshot or a resync, which supersedes all earlier dead letters of the
    table.
    """
    copy: str | None = None
    """The id of the copy that a resync swaps in (`Target.copy`); otherwise None. The copy may be at the same
    position as the target that it replaces.
    """

    @property
    def is_empty(self) -> bool:
        return not (self.files or self.superseded or self.replayed or self.is_resync)

    def counts_for(self, target: Target) -> bool:
        """Whether the target has committed the epoch or the copy of this batch."""
        is_there = target.applied is not None and target.applied >= self.end
        return is_there and (self.copy is None or self.copy == target.copy)

    def dump(self) -> bytes:
        document = {
            "format": FORMAT,
            "table": str(self.table),
            "end": str(self.end),
            "files": list(self.files),
            "superseded": [[*name, by] for name, by in self.superseded.items()],
            "replayed": [list(name) for name in sorted(self.replayed)],
            "anew": self.is_resync,
            "copy": self.copy,
        }
        return json.dumps(document).encode()

    @classmethod
    def parse(cls, data: bytes, where: Path) -> PendingBatch:
        try:
            document = json.loads(data)
            return cls(
                TableName.parse(document["table"]),
                Position.parse(document["end"]),
                tuple(document["files"]),
                {(version, ordinal): by for version, ordinal, by in document["superseded"]},
                frozenset((version, ordinal) for version, ordinal in document["replayed"]),
                bool(document["anew"]),
                document.get("copy"),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise SpoolCorruptError(
                f"{where} has invalid content",
                hint="restore the file; it contains changes to the table's dead letters",
            ) from error


class DeadLetterStore:
    """The stored dead letters of a pipeline. Only the running pipeline writes them, with one thread per
    table. Any process may read them.
    """

    def __init__(self, root: Path, pipeline: str, many: int = MANY) -> None:
        """`many`: minimum number of files to compact."""
        self.directory = root / DEAD_LETTERS / pipeline
        self.pending = self.directory / "_pending"
        self._changes = self.directory / "_changes"
        self.compactor = DeadLetterCompactor(self.directory, many)
        self._lock = threading.RLock()
        """Held while dead letters are settled, and while maintenance changes files of settled ones."""
        self._open: dict[TableName, dict[str, set[Name]]] = {}
        """The open dead letters, by table and file."""
        self._compacting: set[TableName] = set()
        """Tables with a compaction that an error may have interrupted."""
        self._is_durable = False
        """Whether the directory `pending` has been synced to disk."""
        self._load_all_open()

    def _load_all_open(self) -> None:
        while True:
            self._open.clear()
            with suppress(FileNotFoundError):  # a compaction removed the file: read again
                for path in self._visible():
                    self._load_open(path)
                return

    # reading
    # --------------------------------------------------------------------------------------------------------

    def open_names(self, table: TableName) -> set[Name]:
        return {name for names in self._open.get(table, {}).values() for name in names}

    def open_in(self, table: TableName, path: Path) -> set[Name]:
        """The open dead letters in the file at `path`, which is the path of a slice that `slices`
        returned.
        """
        return set(self._open.get(table, {}).get(path.stem, ()))

    @property
    def open_counts(self) -> dict[TableName, int]:
        counts = {table: len(self.open_names(table)) for table in self._open}
        return {table: count for table, count in counts.items() if count}

    def slices(self, table: TableName, end: Position) -> list[FileSlice]:
        """The open dead letters of a table in commit order, as changes at position `end`."""
        self._finish_compaction(table)
        files = {stem: names for stem, names in self._open.get(table, {}).items() if names}
        return [
            load_slice(self._changes / f"{stem}.parquet", names, end)
            for stem, names in sorted(files.items(), key=lambda each: min(each[1]))
        ]

    def pending_slices(self, stems: Iterable[str], end: Position) -> list[FileSlice]:
        """The new dead letters of a pending batch, in the files `stems`, as changes at position `end`."""
        return [load_slice(self.pending / f"{stem}{CHANGES_SUFFIX}", None, end) for stem in stems]

    def load(self) -> pa.Table:
        """All dead letters, in the commit order of their changes."""
        while True:
            with suppress(FileNotFoundError):  # a compaction removed the file: read again
                found = [
                    pq.read_table(path, schema=DEAD_LETTER_SCHEMA, partitioning=None)
                    for path in self._visible()
                ]
                letters = without_duplicates(pa.concat_tables([DEAD_LETTER_SCHEMA.empty_table(), *found]))
                return letters.sort_by([("commit_version", "ascending"), ("ordinal", "ascending")])

    def pending_batches(self) -> list[PendingBatch]:
        """The batches that were neither applied nor discarded yet."""
        found = [(path, storage.read(path)) for path in storage.list_paths(self.pending, "*.json")]
        return [PendingBatch.parse(data, path) for path, data in found if data is not None]

    # writing
    # --------------------------------------------------------------------------------------------------------

    def new_stem(self, table: TableName, end: Position) -> str:
        """Return a new, unique stem for files of dead letters under `pending`."""
        self._make_pending()
        return f"{_digest(table)}-{end.value:016X}-{secrets.token_hex(4)}"

    def add_pending(self, batch: PendingBatch) -> None:
        """Make the batch durable. A table has at most one pending batch."""
        self._make_pending()
        if batch.files:
            storage.sync_directory(self.pending)
        storage.put(self._document(batch.table), batch.dump())

    def _make_pending(self) -> None:
        """Create the directory `pending`, and make it durable, so that batches in it survive a power
        failure.
        """
        for each in (self.directory, self.pending):
            storage.ensure_directory(each)
        if not self._is_durable:
            storage.sync_directories([self.directory, *self.directory.parents[:2]])
            self._is_durable = True

    def settle(self, batch: PendingBatch, *, counts: bool) -> None:
        """Apply the batch if `counts`, otherwise discard it. Idempotent, so it can be repeated after a
        crash.
        """
        with self._lock:
            self._settle(batch, counts=counts)

    def _settle(self, batch: PendingBatch, *, counts: bool) -> None:
        if counts:
            self._finish_compaction(batch.table)
            storage.ensure_directory(self._changes)
            for stem in batch.files:
                _move(self.pending / f"{stem}{CHANGES_SUFFIX}", self._changes / f"{stem}.parquet")
            self._mark(batch)
            for stem in batch.files:
                visible = self.directory / f"{stem}.parquet"
                _move(self.pending / f"{stem}{LETTERS_SUFFIX}", visible)
                self._load_open(visible)
                self._mark_in(stem, batch, {})
            self._remove_settled(batch.table)
            storage.sync_directory(self._changes)
            storage.sync_directory(self.directory)
        storage.delete(self._document(batch.table))
        for stem in batch.files:
            for suffix in (LETTERS_SUFFIX, CHANGES_SUFFIX):
                storage.delete(self.pending / f"{stem}{suffix}")

    def _remove_settled(self, table: TableName) -> None:
        """Remove the files under `_changes` that contain no open dead letter of the table any more."""
        for path in storage.list_paths(self._changes, f"{_digest(table)}-*.parquet"):
            if path.stem not in self._open.get(table, {}):
                storage.delete(path)

    def sweep(self) -> None:
        """Finish interrupted compactions, and remove files under `pending` that belong to no batch, such as
        those of a killed writer. Called at the start of a run.
        """
        self.compactor.finish_interrupted()
        self._load_all_open()
        named = {
            f"{stem}{suffix}"
            for batch in self.pending_batches()
            for stem in batch.files
            for suffix in (LETTERS_SUFFIX, CHANGES_SUFFIX)
        }
        for path in storage.list_paths(self.pending, "*.parquet"):
            if path.name not in named:
                storage.delete(path)

    def forget(self, before: datetime) -> None:
        """Delete dead letters that were settled before the time `before`. Called by maintenance."""
        self.compactor.compact_settled(before, self._lock)

    def compact(self, table: TableName) -> None:
        """Compact the files with open dead letters of a table, if there are many. Requires that the table has
        no pending batch.
        """
        self._finish_compaction(table)
        files = self._open.get(table, {})
        if len(files) >= self.compactor.many:
            newest = max(version for names in files.values() for version, _ in names)
            into = self.new_stem(table, Position.of(newest))
            self._compacting.add(table)
            compaction = self.compactor.compact_open(files, into)
            if compaction is not None:
                self._load_open(self.directory / f"{into}.parquet")
                for stem in compaction.stems:
                    del files[stem]
            self._compacting.discard(table)

    def _finish_compaction(self, table: TableName) -> None:
        """Complete a compaction of the table's files that a disk error interrupted. Called before the files
        are read or changed.
        """
        if table in self._compacting:
            with self._lock:
                self.compactor.finish(f"{_digest(table)}-")
                found = storage.list_paths(self.directory, f"{_digest(table)}-*.parquet")
                for path in found:
                    self._load_open(path)
                for stem in self._open.get(table, {}).keys() - {path.stem for path in found}:
                    del self._open[table][stem]
                self._compacting.discard(table)

    def supersede_all(self, table: TableName) -> None:
        """Supersede all dead letters of a table that is copied from the start, because its target is then
        empty.
        """
        if self._open.get(table) or storage.exists(self._document(table)):
            self.settle(PendingBatch(table, Position.ZERO, is_resync=True), counts=True)

    def _mark(self, batch: PendingBatch) -> None:
        for stem, names in list(self._open.get(batch.table, {}).items()):
            if stem not in batch.files:
                self._mark_in(
                    stem,
                    batch,
                    dict.fromkeys(names, (DeadLetterStatus.SUPERSEDED, batch.end.value))
                    if batch.is_resync
                    else {},
                )

    def _mark_in(
        self, stem: str, batch: PendingBatch, marks: dict[Name, tuple[DeadLetterStatus, int]]
    ) -> None:
        names = self._open.get(batch.table, {}).get(stem, set())
        marks = {
            **marks,
            **{
                name: (DeadLetterStatus.SUPERSEDED, by)
                for name, by in batch.superseded.items()
                if name in names
            },
        }
        marks |= dict.fromkeys(batch.replayed & names, (DeadLetterStatus.REPLAYED, batch.end.value))
        if marks:
            self._rewrite(stem, marks)

    def _rewrite(self, stem: str, marks: Mapping[Name, tuple[DeadLetterStatus, int]]) -> None:
        path = self.directory / f"{stem}.parquet"
        letters = settled(pq.read_table(path, schema=DEAD_LETTER_SCHEMA, partitioning=None), marks)
        with storage.open_output(path) as file:
            pq.write_table(letters, file)
        self._load_open(path)

    def _load_open(self, path: Path) -> None:
        """Load the open dead letters of a file."""
        letters = pq.read_table(path, columns=list(_NAMES), partitioning=None).to_pylist()
        for table in {letter["table"] for letter in letters}:
            names = {
                (each["commit_version"], each["ordinal"])
                for each in letters
                if each["status"] == DeadLetterStatus.OPEN
            }
            self._open.setdefault(TableName.parse(table), {})[path.stem] = names
            if not names:
                del self._open[TableName.parse(table)][path.stem]

    def _visible(self) -> Iterable[Path]:
        return sorted(
            path for path in storage.list_paths(self.directory, "*.parquet") if not path.name.startswith(".")
        )

    def _document(self, table: TableName) -> Path:
        return self.pending / f"{_digest(table)}.json"


def _digest(table: TableName) -> str:
    """Return the prefix of a table's file names. It is a digest, because a table name may contain any
    character and be longer than a file name may be.
    """
    return sha256(str(table).encode()).hexdigest()[:16]


def _move(source: Path, target: Path) -> None:
    if storage.exists(source):
        storage.rename(source, target)


_MAX_ROWS, _MAX_BYTES = 65_536, 64 << 20


def load_held(store: DeadLetterStore, source: TableSchema, fence: Position | None = None) -> pa.Table:
    """Load the keys of the dead letters that were open at `fence`. Without `fence`, load the keys of those
    that are open now. The result has the source's key columns and `_exact`.

    Raises `SnapshotLostError` if one of these dead letters is no longer open, because the file with its key
    may have been removed. Dead letters of another schema of the table are ignored.
    """
    schema = pa.schema(
        [*(pa.field(name, _types(source)[name]) for name in source.key), pa.field(EXACT, EXACT_TYPE)]
    )
    wanted = _open_at(store.load(), source, fence) if source.key else set()
    if not wanted:
        return schema.empty_table()
    try:
        slices = store.slices(source.name, fence or Position.ZERO)
        found = [keys for slice in slices for keys in _keys(slice, source, wanted)]
    except SpoolCorruptError as error:
        raise SnapshotLostError(
            f"dead letters of {source.name} were superseded or replayed during the comparison"
        ) from error
    if wanted - store.open_names(source.name):
        raise SnapshotLostError(
            f"dead letters of {source.name} were superseded or replayed during the comparison"
        )
    return pa.concat_tables([schema.empty_table(), *(pa.table(keys, schema=schema) for keys in found)])


def check_held(source: TableSchema, refused: Sequence[Path], held: pa.Table) -> None:
    """Check that all rows in the files `refused`, which the transform rejected, have dead letters. Raises
    `RowRefusedError` for a row whose key is not in `held`.
    """
    names = [*source.key, EXACT]
    rows = pa.concat_tables(
        [held.slice(0, 0), *(pq.read_table(path, columns=names).cast(held.schema) for path in refused)]
    )
    mine, theirs = key_codes([rows, held], source.key)
    count = int((~np.isin(mine, theirs)).sum())
    if count:
        raise RowRefusedError(
            f"{count:,} rows of {source.name} cannot be transformed, and are not in the dead-letter queue",
            hint=f"resync the table: penstock tables resync CONFIG {source.name}",
        )


def _open_at(letters: pa.Table, source: TableSchema, fence: Position | None) -> set[Name]:
    is_open = pc.equal(letters.column("status"), DeadLetterStatus.OPEN.value)
    if fence is not None:
        since = pc.fill_null(pc.greater(letters.column("settled_version"), fence.value), fill_value=False)
        is_open = pc.and_(
            pc.or_(is_open, since), pc.less_equal(letters.column("commit_version"), fence.value)
        )
    chosen = letters.filter(pc.and_(is_open, pc.equal(letters.column("table"), str(source.name))))
    return set(zip(*(chosen.column(name).to_pylist() for name in ("commit_version", "ordinal")), strict=True))


def _keys(slice: FileSlice, source: TableSchema, wanted: set[Name]) -> Iterator[list[pa.Array]]:
    shape = slice.file.schema
    constant = _constant(shape, source)
    if constant is None:
        return
    for batch in read_rows(slice, _MAX_ROWS, _MAX_BYTES):
        names = zip(
            *(metadata_column(batch, slice, name).to_pylist() for name in (COMMIT_VERSION, ORDINAL)),
            strict=True,
        )
        kept = batch.filter(pa.array([name in wanted for name in names], pa.bool_()))
        columns = {column.name: kept.column(at) for at, column in enumerate(shape.columns)}
        columns |= {
            name: pa.repeat(pa.scalar(text, pa.string()), kept.num_rows) for name, text in constant.items()
        }
        yield [*(columns[name] for name in source.key), metadata_column(kept, slice, EXACT)]


def _constant(shape: TableSchema, source: TableSchema) -> dict[str, str] | None:
    """Return the key columns that have the same value in all dead letters with the schema `shape`, each with
    this value. Only a routed table has such a column, its source column. Returns None if `shape` is not a
    schema of the table.
    """
    if source.members is not None:
        is_member = any(is_same_shape(shape, member) for member in source.members.schemas)
        return {source.members.source_column: str(shape.name)} if is_member else None
    types, mine = _types(shape), _types(source)
    is_same = shape.oid == source.oid and all(types.get(name) == mine[name] for name in source.key)
    return {} if is_same else None


def _types(schema: TableSchema) -> dict[str, pa.DataType]:
    return {column.name: column.arrow_type for column in schema.columns}
