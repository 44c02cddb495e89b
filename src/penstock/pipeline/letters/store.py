"""`penstock_dead_letters`: the letters of a pipeline, beside its tables.

The directory is one table of Parquet files, `LETTERS`. Under `_changes` stands what a replay applies, for letters that are open. What an
epoch does to the letters of a table is a `Posting`, durable under `_pending` before the target commits; it counts if the target got to the
end of that epoch, and is as if it had never been if it did not. A copy that is to take the table's place may end where the table is; that
it did is told by the copy that the target says it is. So a letter is there once, and is settled just when the target has it.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import SpoolCorruptError
from penstock.pipeline.letters.files import load_slice, write_durably
from penstock.pipeline.letters.folding import CHANGES_SUFFIX, LETTERS_SUFFIX, MANY, LetterFolder, each_once
from penstock.pipeline.letters.letter import LETTERS, LetterStatus, settled
from penstock.pipeline.letters.screening import Name
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Target
from penstock.sinks.directories import DEAD_LETTERS
from penstock.spool import storage
from penstock.spool.range import FileSlice

FORMAT = 1
_NAMES = ("table", "status", "commit_version", "ordinal")


@dataclass(frozen=True, slots=True)
class Posting:
    """What an epoch up to `end` does to the letters of a table."""

    table: TableName
    end: Position
    files: tuple[str, ...] = ()
    """New letters: stems of files under `_pending`."""
    superseded: Mapping[Name, int] = field(default_factory=dict)
    replayed: frozenset[Name] = frozenset()
    anew: bool = False
    """The table is copied anew: none of the letters before matters any more."""
    copy: str | None = None
    """What tells the copy that takes the table's place from the one that is there, which may be as far (see `Target`)."""

    @property
    def is_empty(self) -> bool:
        return not (self.files or self.superseded or self.replayed or self.anew)

    def counts_for(self, target: Target) -> bool:
        """Whether the target, by its own word, has taken what this belongs to."""
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
            "anew": self.anew,
            "copy": self.copy,
        }
        return json.dumps(document).encode()

    @classmethod
    def parse(cls, data: bytes, where: Path) -> Posting:
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
            raise SpoolCorruptError(f"{where} cannot be understood", hint="restore the file; it says which letters count") from error


class LetterStore:
    """One writer: the pipeline that runs; of a table, one thread at a time. Anybody may read."""

    def __init__(self, root: Path, pipeline: str, many: int = MANY) -> None:
        """`many`: so many files of a table's open letters are made one."""
        self.directory = root / DEAD_LETTERS / pipeline
        self.pending = self.directory / "_pending"
        self._changes = self.directory / "_changes"
        self.folder = LetterFolder(self.directory, many)
        self._lock = threading.RLock()
        """Files of letters that have just been settled may go at any moment."""
        self._open: dict[TableName, dict[str, set[Name]]] = {}
        """By table and file, the letters that are open."""
        self._folding: set[TableName] = set()
        """Tables of whose files some were to become one, of which it is not known whether they did."""
        self._is_durable = False
        """Whether it is known that `pending` would outlive a power failure."""
        self._look()

    def _look(self) -> None:
        while True:
            self._open.clear()
            with suppress(FileNotFoundError):  # made one with others in this moment: look again
                for path in self._visible():
                    self._take_in(path)
                return

    # reading ----------------------------------------------------------------------------------------------------------------------

    def open_names(self, table: TableName) -> set[Name]:
        return {name for names in self._open.get(table, {}).values() for name in names}

    def open_in(self, table: TableName, path: Path) -> set[Name]:
        """Of one of the files that `slices` gives."""
        return set(self._open.get(table, {}).get(path.stem, ()))

    @property
    def open_counts(self) -> dict[TableName, int]:
        counts = {table: len(self.open_names(table)) for table in self._open}
        return {table: count for table, count in counts.items() if count}

    def slices(self, table: TableName, end: Position) -> list[FileSlice]:
        """The open letters of a table, to be read as changes that come at `end`; in the order of the log."""
        self._finish_fold(table)
        files = {stem: names for stem, names in self._open.get(table, {}).items() if names}
        return [
            load_slice(self._changes / f"{stem}.parquet", names, end)
            for stem, names in sorted(files.items(), key=lambda each: min(each[1]))
        ]

    def pending_slices(self, stems: Iterable[str], end: Position) -> list[FileSlice]:
        """Letters that do not count yet, all of which are open."""
        return [load_slice(self.pending / f"{stem}{CHANGES_SUFFIX}", None, end) for stem in stems]

    def load(self) -> pa.Table:
        """All letters, in the order in which they were refused."""
        while True:
            with suppress(FileNotFoundError):  # made one with others in this moment: look again
                found = [pq.read_table(path, schema=LETTERS, partitioning=None) for path in self._visible()]
                letters = each_once(pa.concat_tables([LETTERS.empty_table(), *found]))
                return letters.sort_by([("commit_version", "ascending"), ("ordinal", "ascending")])

    def postings(self) -> list[Posting]:
        """Of which it is not known yet whether they count."""
        found = [(path, storage.read_bytes(path)) for path in sorted(self.pending.glob("*.json"))]
        return [Posting.parse(data, path) for path, data in found if data is not None]

    # writing ----------------------------------------------------------------------------------------------------------------------

    def new_stem(self, table: TableName, end: Position) -> str:
        """For files of new letters, under `pending`, written by whoever has them."""
        self._make_pending()
        return f"{_digest(table)}-{end.value:016X}-{secrets.token_hex(4)}"

    def post(self, posting: Posting) -> None:
        """Make it durable. At most one of a table waits at any time."""
        self._make_pending()
        if posting.files:
            storage.sync_directory(self.pending)
        storage.replace_bytes(self._document(posting.table), posting.dump())

    def _make_pending(self) -> None:
        """Durable with what leads to it: a posting in a directory that is gone after a power failure was never made."""
        for each in (self.directory, self.pending):
            storage.make_directory(each)
        if not self._is_durable:
            storage.sync_directories([self.directory, *self.directory.parents[:2]])
            self._is_durable = True

    def settle(self, posting: Posting, *, counts: bool) -> None:
        """Make it so, or let it be forgotten. May be repeated after a crash."""
        with self._lock:
            self._settle(posting, counts=counts)

    def _settle(self, posting: Posting, *, counts: bool) -> None:
        if counts:
            self._finish_fold(posting.table)
            storage.make_directory(self._changes)
            for stem in posting.files:
                _move(self.pending / f"{stem}{CHANGES_SUFFIX}", self._changes / f"{stem}.parquet")
            self._mark(posting)
            for stem in posting.files:
                visible = self.directory / f"{stem}.parquet"
                _move(self.pending / f"{stem}{LETTERS_SUFFIX}", visible)
                self._take_in(visible)
                self._mark_in(stem, posting, {})
            self._remove_settled(posting.table)
            storage.sync_directory(self._changes)
            storage.sync_directory(self.directory)
        storage.remove_file(self._document(posting.table))
        for stem in posting.files:
            for suffix in (LETTERS_SUFFIX, CHANGES_SUFFIX):
                storage.remove_file(self.pending / f"{stem}{suffix}")

    def _remove_settled(self, table: TableName) -> None:
        """Changes that nobody will replay any more."""
        for path in self._changes.glob(f"{_digest(table)}-*.parquet"):
            if path.stem not in self._open.get(table, {}):
                storage.remove_file(path)

    def sweep(self) -> None:
        """At the start of a run: files of letters that no posting names, which somebody wrote who was killed."""
        self.folder.mend()
        self._look()
        named = {f"{stem}{suffix}" for posting in self.postings() for stem in posting.files for suffix in (LETTERS_SUFFIX, CHANGES_SUFFIX)}
        for path in self.pending.glob("*.parquet"):
            if path.name not in named:
                storage.remove_file(path)

    def forget(self, before: datetime) -> None:
        """Beside the epochs: letters that were settled `before`."""
        self.folder.fold_settled(before, self._lock)

    def fold(self, table: TableName) -> None:
        """Of a table of which nothing waits, make files one if they are many."""
        self._finish_fold(table)
        files = self._open.get(table, {})
        if len(files) >= self.folder.many:
            newest = max(version for names in files.values() for version, _ in names)
            into = self.new_stem(table, Position.of(newest))
            self._folding.add(table)
            folding = self.folder.fold_open(files, into)
            if folding is not None:
                self._take_in(self.directory / f"{into}.parquet")
                for stem in folding.stems:
                    del files[stem]
            self._folding.discard(table)

    def _finish_fold(self, table: TableName) -> None:
        """If the disk failed when files became one: before anybody reads them, or marks letters in one that another replaces."""
        if table in self._folding:
            with self._lock:
                self.folder.finish(f"{_digest(table)}-")
                found = sorted(self.directory.glob(f"{_digest(table)}-*.parquet"))
                for path in found:
                    self._take_in(path)
                for stem in self._open.get(table, {}).keys() - {path.stem for path in found}:
                    del self._open[table][stem]
                self._folding.discard(table)

    def void(self, table: TableName) -> None:
        """The table is about to be copied from the beginning, and nothing of it is in the target."""
        if self._open.get(table) or self._document(table).exists():
            self.settle(Posting(table, Position.ZERO, anew=True), counts=True)

    def _mark(self, posting: Posting) -> None:
        for stem, names in list(self._open.get(posting.table, {}).items()):
            if stem not in posting.files:
                self._mark_in(stem, posting, dict.fromkeys(names, (LetterStatus.SUPERSEDED, posting.end.value)) if posting.anew else {})

    def _mark_in(self, stem: str, posting: Posting, marks: dict[Name, tuple[LetterStatus, int]]) -> None:
        names = self._open.get(posting.table, {}).get(stem, set())
        marks = {**marks, **{name: (LetterStatus.SUPERSEDED, by) for name, by in posting.superseded.items() if name in names}}
        marks |= dict.fromkeys(posting.replayed & names, (LetterStatus.REPLAYED, posting.end.value))
        if marks:
            self._rewrite(stem, marks)

    def _rewrite(self, stem: str, marks: Mapping[Name, tuple[LetterStatus, int]]) -> None:
        path = self.directory / f"{stem}.parquet"
        temporary = path.with_name(f".{path.name}.tmp")
        write_durably(temporary, settled(pq.read_table(path, schema=LETTERS, partitioning=None), marks))
        storage.rename(temporary, path)
        storage.sync_directory(self.directory)
        self._take_in(path)

    def _take_in(self, path: Path) -> None:
        """Learn which letters of a file are open."""
        letters = pq.read_table(path, columns=list(_NAMES), partitioning=None).to_pylist()
        for table in {letter["table"] for letter in letters}:
            names = {(each["commit_version"], each["ordinal"]) for each in letters if each["status"] == LetterStatus.OPEN}
            self._open.setdefault(TableName.parse(table), {})[path.stem] = names
            if not names:
                del self._open[TableName.parse(table)][path.stem]

    def _visible(self) -> Iterable[Path]:
        return sorted(path for path in self.directory.glob("*.parquet") if not path.name.startswith("."))

    def _document(self, table: TableName) -> Path:
        return self.pending / f"{_digest(table)}.json"


def _digest(table: TableName) -> str:
    """Names of tables may be anything, and longer than those of files."""
    return sha256(str(table).encode()).hexdigest()[:16]


def _move(source: Path, target: Path) -> None:
    if source.exists():
        storage.rename(source, target)
