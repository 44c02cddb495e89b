"""The log of a Delta table, cut off at the versions that are kept, with the files that only the others need.

Every epoch leaves a commit, and whatever lists the log of a table goes through all of them. So the newest checkpoint at or before the
oldest version that is kept becomes the beginning of the log. What the commits up to there took away, no version from there on has: those
files go without a look at the directory. Files that no commit ever named, and what a table that somebody restored has twice, are left to
VACUUM. A crash anywhere leaves a log that begins a little earlier.
"""

from __future__ import annotations

import json
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.sinks.delta.state import DataFile, DeltaState, commit_file, is_restore, load_checkpointed
from penstock.sinks.delta.vectors import DeletionVector, local_path, vector_file
from penstock.sinks.upkeep import Upkeep
from penstock.spool import storage

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
_FEW_COMMITS = 1000
_IN_USE_SECONDS = 600.0
"""So long somebody may read a checkpoint that is not the newest any more."""


class LogTrimmer:
    """Of one table. Used by one thread, beside the epochs; others may commit meanwhile, but only this cuts the log."""

    def __init__(self, path: Path, table: str | None) -> None:
        """`table`: what tells it from one that was there before."""
        self.table = table
        self._path = path
        names = storage.list_files(path / "_delta_log")
        self._first = min((int(match[1]) for name in names if (match := _COMMIT.fullmatch(name))), default=0)
        self._checkpoints = sorted(int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name)))
        self._seen = self._first - 1
        self._restored = -1

    @property
    def checkpoint(self) -> int:
        """The newest that is known; -1: none."""
        return max(self._checkpoints, default=-1)

    def has(self, checkpoint: int) -> None:
        """Another one has been written."""
        if checkpoint not in self._checkpoints:
            self._checkpoints.append(checkpoint)

    def trim(self, state: DeltaState, upkeep: Upkeep) -> None:
        """Cut off what `upkeep` does not keep of the table, which is as in `state` now."""
        oldest = self._oldest_kept(state.version, upkeep)
        begins = max((each for each in self._checkpoints if each <= oldest), default=-1)
        if begins > self._first:
            self._begin_with(begins, load_checkpointed(self._path, begins).files.values(), state)
        self._thin_out()

    def _begin_with(self, begins: int, files: Iterable[DataFile], state: DeltaState) -> None:
        """Make the checkpoint of version `begins`, at which the table had `files`, the beginning of the log."""
        self._look_for_restores(state.version)
        if self._restored <= begins:
            self._remove_files(begins, [*files, *state.files.values()])
        for version in range(self._first, begins):
            self._remove_version(version)
        self._first = begins

    def oldest_kept_ms(self, version: int, upkeep: Upkeep) -> int:
        """From when on what is gone is still needed by a version that is kept."""
        at = min(self._oldest_kept(version, upkeep), version)
        begins = max((each for each in self._checkpoints if each <= at), default=self._first)
        return int(self._time(begins) * 1000)

    def _oldest_kept(self, version: int, upkeep: Upkeep) -> int:
        if upkeep.keep_seconds is None:
            return self._first
        young = self._first_since(version, upkeep.keep_seconds)
        recent = self._first_since(version, upkeep.hold_seconds)
        return max(young, min(version - upkeep.versions + 1, recent))

    def _first_since(self, version: int, seconds: float) -> int:
        """The first version that became so within the last `seconds`; the one after `version` if none did."""
        return self._first + bisect_left(range(self._first, version + 1), time.time() - seconds, key=self._time)

    def _time(self, version: int) -> float:
        mark = storage.mark(commit_file(self._path, version))
        return 0.0 if mark is None else mark.modified_ns / 1e9

    def _look_for_restores(self, version: int) -> None:
        """Files that are gone may have come back by one."""
        for number in range(self._seen + 1, version + 1):
            if is_restore(list(self._actions(number, b'"commitInfo"'))):
                self._restored = number
        self._seen = version

    def _remove_files(self, begins: int, needed: Iterable[DataFile]) -> None:
        """What the commits up to `begins` took away, but for what is `needed`."""
        held = {file for each in needed for file in self._files(each.action)}
        gone = {
            file
            for version in range(self._first, begins + 1)
            for action in self._actions(version, b'"remove"')
            if "remove" in action
            for file in self._files(action["remove"])
        }
        for file in gone - held:
            if file.is_relative_to(self._path):
                storage.remove_file(file)

    def _files(self, action: Mapping[str, Any]) -> Iterator[Path]:
        """A file of the table, and that of its vector."""
        yield local_path(self._path, action["path"])
        found = action.get("deletionVector")
        if found is not None and found["storageType"] != "i":
            yield vector_file(self._path, DeletionVector.parse(found))

    def _actions(self, version: int, kind: bytes) -> Iterator[Mapping[str, Any]]:
        data = storage.read_bytes(commit_file(self._path, version)) or b""
        return (json.loads(line) for line in data.splitlines() if kind in line)

    def _remove_version(self, version: int) -> None:
        """The commit, the checkpoint, and what Delta and Hadoop put beside them."""
        stem = f"{version:020d}"
        self._remove(f"{stem}.json", f"{stem}.checkpoint.parquet", f"{stem}.crc")
        self._checkpoints = [each for each in self._checkpoints if each != version]

    def _thin_out(self) -> None:
        """Older versions are begun with fewer checkpoints than the newest: each of them lists all that is gone."""
        kept: list[int] = []
        for each in sorted(self._checkpoints):
            is_needed = not kept or each - kept[-1] >= _FEW_COMMITS or each == self.checkpoint
            if is_needed or time.time() - self._time(each) < _IN_USE_SECONDS:
                kept.append(each)
            else:
                self._remove(f"{each:020d}.checkpoint.parquet")
        self._checkpoints = kept

    def _remove(self, *names: str) -> None:
        for name in names:
            for each in (name, f".{name}.crc"):
                storage.remove_file(self._path / "_delta_log" / each)
