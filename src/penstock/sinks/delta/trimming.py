"""The log of a Delta table, cut off at the versions that are kept, with the files that only the others need.

Every epoch leaves a commit, and whatever lists the log of a table goes through all of them. So the newest checkpoint at or before the
oldest version that is kept becomes the beginning of the log. What the commits up to there took away, no version from there on has: those
files go without a look at the directory. Files that no commit ever named, and what a table that somebody restored has twice, are left to
VACUUM. A crash anywhere leaves a log that begins a little earlier.

A version is as old as the next one: what the table was at a time is the newest version that is not younger. In the same way a checkpoint
may be in use until the next one has been there for a while, whenever its own version was made.
"""

from __future__ import annotations

import json
import math
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.errors import FileOutsideTableError
from penstock.sinks.delta.checkpoints import checkpoint_file, is_ours
from penstock.sinks.delta.log import OWNER
from penstock.sinks.delta.paths import name_in_table, table_file
from penstock.sinks.delta.retention import asked_seconds, removed_seconds
from penstock.sinks.delta.state import DataFile, DeltaState, Unsupported, commit_file, is_restore, load_checkpointed
from penstock.sinks.delta.vectors import DeletionVector, vector_name
from penstock.sinks.upkeep import Upkeep
from penstock.spool import storage

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
_FEW_COMMITS = 1000
_READ_SECONDS = 600.0
"""Whoever has listed the log reads the checkpoint that it found within this time."""


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
        self._times_ms: list[int] = []
        """When the versions from the first on became so, as far as it was asked for."""
        self._owned: int | None = None
        self._foreign: set[int] = set()
        """Checkpoints that others wrote, as far as it was asked for."""

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
        if upkeep.keep_seconds is None:
            return
        begins = self._beginning(state, upkeep)
        if begins > self._first:
            self._begin_with(begins, load_checkpointed(self._path, begins).files.values(), state)
        self._thin_out(time.time() - min(upkeep.hold_seconds, _READ_SECONDS))

    def _beginning(self, state: DeltaState, upkeep: Upkeep) -> int:
        """The version with which the log is to begin. Those who began with the checkpoint before it are given time to end."""
        oldest, written = self._oldest_kept(state, upkeep), time.time() - upkeep.hold_seconds
        return max(self._first, *(each for each in self._checkpoints if each <= oldest and self._written(each) <= written), -1)

    def _begin_with(self, begins: int, files: Iterable[DataFile], state: DeltaState) -> None:
        """Make the checkpoint of version `begins`, at which the table had `files`, the beginning of the log."""
        self._look_for_restores(state.version)
        if self._restored <= begins:
            self._remove_files(begins, [*files, *state.files.values()])
        for version in range(self._first, begins):
            self._remove_version(version)
        del self._times_ms[: begins - self._first]
        self._first = begins

    def oldest_kept_ms(self, state: DeltaState, upkeep: Upkeep) -> int:
        """From when on what is gone is still needed: by a version that is kept or, where nothing is removed, by Delta."""
        if upkeep.keep_seconds is None:
            return int(max(0.0, time.time() - removed_seconds(state.metadata.properties)) * 1000)
        begins = self._beginning(state, upkeep)
        return min(self._times_upto(state.version)[begins - self._first :])

    def _oldest_kept(self, state: DeltaState, upkeep: Upkeep) -> int:
        if upkeep.keep_seconds is None:
            return self._first
        asked = max(upkeep.hold_seconds, asked_seconds(state.metadata.properties))
        young = self._current(state.version, max(upkeep.keep_seconds, asked))
        many = min(state.version - upkeep.versions + 1, self._current(state.version, asked))
        return many if many > young >= self._owned_since(state.version) else young

    def _current(self, version: int, seconds: float) -> int:
        """The version that the table had so long ago; the first one if that is not known any more.

        As Delta has it, no version is older than the one before it, whatever its file says.
        """
        times = list(accumulate(self._times_upto(version), max))
        return self._first + max(bisect_right(times, (time.time() - seconds) * 1000) - 1, 0)

    def _times_upto(self, version: int) -> list[int]:
        for number in range(self._first + len(self._times_ms), version + 1):
            mark = storage.mark(commit_file(self._path, number))
            self._times_ms.append(0 if mark is None else mark.modified_ns // 1_000_000)
        return self._times_ms[: version + 1 - self._first]

    def _written(self, checkpoint: int) -> float:
        """For one that somebody has taken away: never."""
        mark = storage.mark(checkpoint_file(self._path, checkpoint))
        return math.inf if mark is None else mark.modified_ns / 1e9

    def _owned_since(self, version: int) -> int:
        """The first version that was a pipeline's. Those before it, if it was adopted, are history that only its age may end."""
        if self._owned is None:
            later = () if self._begins_owned() else range(self._first, version + 1)
            self._owned = next(filter(self._is_taken, later), self._first)
        return self._owned

    def _begins_owned(self) -> bool:
        try:
            return OWNER in load_checkpointed(self._path, self._first).metadata.properties
        except Unsupported:
            return False

    def _is_taken(self, version: int) -> bool:
        found = (action.get("metaData", {}).get("configuration") or {} for action in self._actions(version, b'"metaData"'))
        return any(OWNER in properties for properties in found)

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
        for name in gone - held:
            with suppress(FileOutsideTableError):
                storage.remove_file(table_file(self._path, quote(name)))

    def _files(self, action: Mapping[str, Any]) -> Iterator[str]:
        """The names of a file of the table, and of the file with its vector. A file outside the table is left alone."""
        found = action.get("deletionVector")
        uris = [action["path"]]
        if found is not None and found["storageType"] != "i":
            uris.append(vector_name(DeletionVector.parse(found)))
        for uri in uris:
            with suppress(FileOutsideTableError):
                yield name_in_table(self._path, uri)

    def _actions(self, version: int, kind: bytes) -> Iterator[Mapping[str, Any]]:
        data = storage.read_bytes(commit_file(self._path, version)) or b""
        return (json.loads(line) for line in data.splitlines() if kind in line)

    def _remove_version(self, version: int) -> None:
        """The commit, the checkpoint, and what Delta and Hadoop put beside them."""
        stem = f"{version:020d}"
        self._remove(f"{stem}.json", f"{stem}.checkpoint.parquet", f"{stem}.crc")
        self._checkpoints = [each for each in self._checkpoints if each != version]

    def _thin_out(self, written: float) -> None:
        """Older versions are begun with fewer checkpoints than the newest: each of them lists all that is gone.

        One goes if the next has been there since `written`. Those of others are theirs to remove.
        """
        ordered = sorted(self._checkpoints)
        kept = ordered[:1]
        for each, later in pairwise(ordered[1:]):
            if each - kept[-1] >= _FEW_COMMITS or self._written(later) > written or self._is_foreign(each):
                kept.append(each)
            else:
                self._remove(f"{each:020d}.checkpoint.parquet")
        self._checkpoints = [*kept, *ordered[max(1, len(ordered) - 1) :]]

    def _is_foreign(self, checkpoint: int) -> bool:
        if checkpoint not in self._foreign:
            if is_ours(self._path, checkpoint):
                return False
            self._foreign.add(checkpoint)
        return True

    def _remove(self, *names: str) -> None:
        for name in names:
            for each in (name, f".{name}.crc"):
                storage.remove_file(self._path / "_delta_log" / each)
