"""Files of letters, made few: every epoch that refuses something leaves some, and whoever looks at the letters opens them all.

Letters that are open are read again by every epoch of their table, and replayed from what stands under `_changes`; so files of theirs are
made one by the thread that applies the table's epochs, and a crash in the midst of it is mended by what it had written down before. Settled
letters are nobody's any more but people's: they are put together beside the epochs, and forgotten after a while. A reader may see one of
them twice for a moment; it is the same letter.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import COMMIT_VERSION, ORDINAL, metadata_place
from penstock.errors import SpoolCorruptError
from penstock.pipeline.letters.files import read_changes, shape_of, write_changes, write_durably
from penstock.pipeline.letters.letter import LETTERS, LetterStatus
from penstock.pipeline.letters.screening import Name
from penstock.spool import storage

LETTERS_SUFFIX, CHANGES_SUFFIX = ".letters.parquet", ".changes.parquet"
MANY = 32
_SETTLED = "settled-"
_TIMES = ("status", "refused_at", "settled_at")
_LARGE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Folding:
    """Files of a table's letters that become one; durable before anything of it is done."""

    into: str
    stems: tuple[str, ...]

    def dump(self) -> bytes:
        return json.dumps({"into": self.into, "stems": list(self.stems)}).encode()

    @classmethod
    def parse(cls, data: bytes, where: Path) -> Folding:
        try:
            document = json.loads(data)
            return cls(document["into"], tuple(document["stems"]))
        except (ValueError, KeyError, TypeError) as error:
            raise SpoolCorruptError(f"{where} cannot be understood", hint="restore the file; it says which letters count") from error


@dataclass(frozen=True, slots=True)
class LetterFolder:
    """The directory of a pipeline's letters."""

    directory: Path
    many: int = MANY
    """Files that become one."""

    @property
    def _pending(self) -> Path:
        return self.directory / "_pending"

    @property
    def _changes(self) -> Path:
        return self.directory / "_changes"

    def fold_open(self, files: Mapping[str, set[Name]], into: str) -> Folding | None:
        """Make some of the `files` of a table, with their open letters, one: neighbours in the log, and of the same shape."""
        stems = sorted(files, key=lambda stem: min(files[stem]))
        runs = [list(run) for _, run in groupby(stems, lambda stem: shape_of(self._changes / f"{stem}.parquet"))]
        run = max(runs, key=len)
        if len(run) < 2:
            return None
        storage.make_directory(self._pending)
        schema, batches = None, []
        for stem in run:
            schema, rows = read_changes(self._changes / f"{stem}.parquet")
            places = (metadata_place(schema, name) for name in (COMMIT_VERSION, ORDINAL))
            names = zip(*(rows.column(place).to_pylist() for place in places), strict=True)
            batches += rows.filter(pa.array([name in files[stem] for name in names], pa.bool_())).to_batches()
        assert schema is not None
        write_changes(self._pending / f"{into}{CHANGES_SUFFIX}", schema, batches)
        write_durably(self._pending / f"{into}{LETTERS_SUFFIX}", _load(self.directory / f"{stem}.parquet" for stem in run))
        storage.sync_directory(self._pending)
        folding = Folding(into, tuple(run))
        storage.replace_bytes(self._document(into), folding.dump())
        self._finish(folding)
        return folding

    def mend(self) -> None:
        """At the start of a run: finish what a crash left unfinished."""
        for path in (*self.directory.glob(".*.tmp"), *self._pending.glob("*.tmp")):
            storage.remove_file(path)
        self.finish("")

    def finish(self, prefix: str) -> None:
        """Do what was written down, as far as it is not done, where the files that become one begin so."""
        found = sorted(self._pending.glob(f"{prefix}*.fold"))
        if found:
            storage.sync_directory(self._pending)
        for path in found:
            data = storage.read_bytes(path)
            if data is not None:
                self._finish(Folding.parse(data, path))

    def _finish(self, folding: Folding) -> None:
        for suffix, place in ((CHANGES_SUFFIX, self._changes), (LETTERS_SUFFIX, self.directory)):
            source = self._pending / f"{folding.into}{suffix}"
            if source.exists():
                storage.rename(source, place / f"{folding.into}.parquet")
                storage.sync_directory(place)
        for stem in folding.stems:
            storage.remove_file(self.directory / f"{stem}.parquet")
            storage.remove_file(self._changes / f"{stem}.parquet")
        storage.remove_file(self._document(folding.into))

    def _document(self, into: str) -> Path:
        return self._pending / f"{into}.fold"

    def fold_settled(self, before: datetime, turn: AbstractContextManager[object]) -> None:
        """Put settled letters together once their files are many, and forget those that were settled `before`.

        `turn` is taken when files come and go, and only then: who has just settled the letters of a file may still look at it.
        """
        visible = [path for path in self.directory.glob("*.parquet") if not path.name.startswith(".")]
        settled = [each for path in visible if (each := SettledFile.look(path, before)) is not None]
        few = [each for each in settled if each.bytes < _LARGE_BYTES]
        single = [each for each in few if not each.path.name.startswith(_SETTLED)]
        if len(single) >= self.many or any(each.old for each in few):
            self._put_together([each.path for each in few], before, turn)
        forgotten = [each.path for each in settled if each.bytes >= _LARGE_BYTES and each.old == each.rows]
        if forgotten:
            with turn:
                _remove(forgotten)

    def _put_together(self, paths: Sequence[Path], before: datetime, turn: AbstractContextManager[object]) -> None:
        target = self.directory / f"{_SETTLED}{secrets.token_hex(8)}.parquet"
        temporary = target.with_name(f".{target.name}.tmp")
        seen: set[tuple[object, ...]] = set()
        with storage.create_file(temporary) as file, pq.ParquetWriter(file, LETTERS) as writer:
            for path in paths:  # one at a time: together they may be large
                letters = _load([path])
                writer.write_table(each_once(letters.filter(_since(letters, before)), seen))
        storage.sync_file(temporary)
        with turn:
            if seen:
                storage.rename(temporary, target)
                storage.sync_directory(self.directory)
            _remove([temporary, *paths])


@dataclass(frozen=True, slots=True)
class SettledFile:
    """A file of letters of which none is open; such a file is never written again."""

    path: Path
    bytes: int
    rows: int
    old: int
    """Of these, those that are to be forgotten."""

    @classmethod
    def look(cls, path: Path, before: datetime) -> SettledFile | None:
        """None if a letter is open, or the file is gone by now."""
        try:
            size = path.stat().st_size
            letters = pq.read_table(path, columns=list(_TIMES), schema=LETTERS, partitioning=None)
        except FileNotFoundError:
            return None
        if pc.any(pc.equal(letters.column("status"), LetterStatus.OPEN.value)).as_py():
            return None
        return cls(path, size, letters.num_rows, letters.num_rows - (pc.sum(_since(letters, before)).as_py() or 0))


def each_once(letters: pa.Table, seen: set[tuple[object, ...]] | None = None) -> pa.Table:
    """A letter that is there twice is the same letter; those that were `seen` before are left out too."""
    seen = set() if seen is None else seen
    wanted = []
    for name in zip(*(letters.column(each).to_pylist() for each in ("table", "commit_version", "ordinal")), strict=True):
        wanted.append(name not in seen)
        seen.add(name)
    return letters if all(wanted) else letters.filter(pa.array(wanted))


def _load(paths: Iterable[Path]) -> pa.Table:
    found = [pq.read_table(path, schema=LETTERS, partitioning=None) for path in paths]
    return pa.concat_tables([LETTERS.empty_table(), *found])


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        storage.remove_file(path)


def _since(letters: pa.Table, before: datetime) -> pa.Array:
    settled = pc.coalesce(letters.column("settled_at"), letters.column("refused_at"))
    return pc.greater_equal(settled, pa.scalar(before, pa.timestamp("us", "UTC")))
