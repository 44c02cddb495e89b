"""Maintenance of Delta tables: compaction, checkpoints, log cleanup and VACUUM, with the retention that a
table's properties require.

One thread maintains one table after the other, while epochs continue. It derives the work that is due from
the table itself, so restarts do not matter. Maintenance changes no row and no position; a failed step is due
again next time.

Every epoch adds a commit to the log, and every listing of the log returns all commits. So the log is trimmed:
the newest checkpoint at or before the oldest kept version becomes the start of the log. No kept version uses
the data files that commits up to this checkpoint removed, so these files are deleted by name, without listing
the directory. VACUUM deletes the other unused files: those that no commit names, and those that were removed
before a RESTORE. A crash while the log is trimmed only makes the log begin earlier.

A version is current until its successor is committed, so its age for the retention is the age of the
successor. In the same way, readers may use a checkpoint until the next checkpoint has existed for a while,
whatever the age of the versions.

Retention properties are intervals as Spark writes them: `interval 30 days`, `interval 1 week 12 hours`. A
property that cannot be parsed means forever.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pyspark.sql import SparkSession

from penstock import storage
from penstock.errors import FileOutsideTableError
from penstock.sinks.base import Cooldown, MaintenanceSettings
from penstock.sinks.dataframes import quoted
from penstock.sinks.delta.checkpoints import (
    checkpoint_file,
    is_ours,
    write_checkpoint,
    write_checkpoint_by_delta,
)
from penstock.sinks.delta.compaction import SharedTable, compact, files_to_compact
from penstock.sinks.delta.deletion_vectors import DeletionVector, name_in_table, table_file, vector_name
from penstock.sinks.delta.log import OWNER, load_summary
from penstock.sinks.delta.spark_merge import translated_errors
from penstock.sinks.delta.state import (
    DataFile,
    DeltaState,
    Unsupported,
    commit_file,
    is_restore,
    load_checkpointed,
    newest_checkpoint,
)
from penstock.sinks.executors import Executors

_LOG = "delta.logRetentionDuration"
_FILES = "delta.deletedFileRetentionDuration"
_FILES_SECONDS = 7 * 86400.0
_INTERVAL = re.compile(r"\s*(?:interval\s+)?((?:\d+\s+[a-z]+\s*)+)")
_PART = re.compile(r"(\d+)\s+([a-z]+)")
_SECONDS = {
    "week": 604800.0,
    "day": 86400.0,
    "hour": 3600.0,
    "minute": 60.0,
    "second": 1.0,
    "millisecond": 1e-3,
    "microsecond": 1e-6,
}


def required_retention_seconds(properties: Mapping[str, str]) -> float:
    """The period of time travel that the table's properties require, in seconds; 0 if they require none."""
    return max(
        (parse_interval(properties[name]) for name in (_LOG, _FILES) if name in properties), default=0.0
    )


def removed_file_retention_seconds(properties: Mapping[str, str]) -> float:
    """The time in seconds for which Delta needs the record of a removed file."""
    return parse_interval(properties[_FILES]) if _FILES in properties else _FILES_SECONDS


def parse_interval(text: str) -> float:
    """Convert an interval to seconds; infinity if it cannot be parsed. Months and years cannot, because they
    have no fixed length; Delta rejects them too.
    """
    match = _INTERVAL.fullmatch(text.lower())
    parts = [(int(count), unit.removesuffix("s")) for count, unit in _PART.findall(match[1])] if match else []
    if not parts or any(unit not in _SECONDS for _, unit in parts):
        return math.inf
    return sum(count * _SECONDS[unit] for count, unit in parts)


_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
_FEW_COMMITS = 1000
_READ_SECONDS = 600.0
"""The longest time that a reader may need between listing the log and reading the checkpoint that it found.
"""


class LogTrimmer:
    """Trims the log of one table. Used by one thread. Other writers may commit at the same time, but must not
    trim the log.
    """

    def __init__(self, path: Path, table: str | None) -> None:
        """`table` is the id of the table, which distinguishes it from a former table at the same path."""
        self.table = table
        self._path = path
        names = storage.list_files(path / "_delta_log")
        self._first = min((int(match[1]) for name in names if (match := _COMMIT.fullmatch(name))), default=0)
        self._checkpoints = sorted(int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name)))
        self._seen = self._first - 1
        self._restored = -1
        self._times_ms = array("q")
        """The commit times of the log's versions, beginning with the first version, as far as they were read.
        """
        self._owned: int | None = None
        self._foreign: set[int] = set()
        """The checkpoints that were found to be made by other writers."""

    @property
    def checkpoint(self) -> int:
        """The version of the newest known checkpoint; -1 if there is none."""
        return max(self._checkpoints, default=-1)

    def has(self, checkpoint: int) -> None:
        """Record that the checkpoint of this version was written."""
        if checkpoint not in self._checkpoints:
            self._checkpoints.append(checkpoint)

    def trim(self, state: DeltaState, settings: MaintenanceSettings) -> None:
        """Remove the versions that `settings` does not keep. `state` is the current state of the table."""
        if settings.keep_seconds is None:
            return
        begins = self._choose_start(state, settings)
        if begins > self._first:
            self._trim_to(begins, load_checkpointed(self._path, begins).files.values(), state)
        self._remove_checkpoints(time.time() - min(settings.hold_seconds, _READ_SECONDS))

    def _choose_start(self, state: DeltaState, settings: MaintenanceSettings) -> int:
        """The version at which the log should begin: the newest checkpoint that no kept version precedes. A
        checkpoint younger than `hold_seconds` does not count, so that readers of the previous one can finish.
        """
        oldest, written = self._oldest_kept(state, settings), time.time() - settings.hold_seconds
        return max(
            self._first,
            *(each for each in self._checkpoints if each <= oldest and self._written(each) <= written),
            -1,
        )

    def _trim_to(self, begins: int, files: Iterable[DataFile], state: DeltaState) -> None:
        """Make the checkpoint of version `begins`, at which the table had `files`, the start of the log."""
        self._keep_restored(state.version)
        if self._restored <= begins:
            self._remove_files(begins, [*files, *state.files.values()])
        for version in range(self._first, begins):
            self._remove_version(version)
        del self._times_ms[: begins - self._first]
        self._first = begins

    def oldest_kept_ms(self, state: DeltaState, settings: MaintenanceSettings) -> int:
        """The time in milliseconds after which removed files are still needed: by kept versions, or by Delta
        if no version is ever removed.
        """
        if settings.keep_seconds is None:
            return int(
                max(0.0, time.time() - removed_file_retention_seconds(state.metadata.properties)) * 1000
            )
        begins = self._choose_start(state, settings)
        return min(self._times_upto(state.version)[begins - self._first :])

    def _oldest_kept(self, state: DeltaState, settings: MaintenanceSettings) -> int:
        if settings.keep_seconds is None:
            return self._first
        asked = max(settings.hold_seconds, required_retention_seconds(state.metadata.properties))
        young = self._current(state.version, max(settings.keep_seconds, asked))
        many = min(state.version - settings.versions + 1, self._current(state.version, asked))
        return many if many > young >= self._owned_since(state.version) else young

    def _current(self, version: int, seconds: float) -> int:
        """The version that was current `seconds` ago; the first version of the log if that is unknown.

        As in Delta, no version is older than its predecessor, whatever the time of its file.
        """
        times = list(accumulate(self._times_upto(version), max))
        return self._first + max(bisect_right(times, (time.time() - seconds) * 1000) - 1, 0)

    def _times_upto(self, version: int) -> array[int]:
        for number in range(self._first + len(self._times_ms), version + 1):
            mark = storage.file_version(commit_file(self._path, number))
            self._times_ms.append(0 if mark is None else mark.modified_ns // 1_000_000)
        return self._times_ms[: version + 1 - self._first]

    def _written(self, checkpoint: int) -> float:
        """The time at which the checkpoint was written. A checkpoint that no longer exists counts as never
        written.
        """
        mark = storage.file_version(checkpoint_file(self._path, checkpoint))
        return math.inf if mark is None else mark.modified_ns / 1e9

    def _owned_since(self, version: int) -> int:
        """The first version that belongs to a pipeline. Earlier versions of an adopted table are history that
        is removed only by age.
        """
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
        found = (
            action.get("metaData", {}).get("configuration") or {}
            for action in self._actions(version, b'"metaData"')
        )
        return any(OWNER in properties for properties in found)

    def _keep_restored(self, version: int) -> None:
        """Find the newest RESTORE up to `version`, which may have brought back removed files."""
        for number in range(self._seen + 1, version + 1):
            if is_restore(list(self._actions(number, b'"commitInfo"'))):
                self._restored = number
        self._seen = version

    def _remove_files(self, begins: int, needed: Iterable[DataFile]) -> None:
        """Delete the files that commits up to `begins` removed, except those that are `needed`."""
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
                storage.delete(table_file(self._path, quote(name)))

    def _files(self, action: Mapping[str, Any]) -> Iterator[str]:
        """Yield the paths of a data file and of the file with its deletion vector. Files outside of the
        table's directory are ignored.
        """
        found = action.get("deletionVector")
        uris = [action["path"]]
        if found is not None and found["storageType"] != "i":
            uris.append(vector_name(DeletionVector.parse(found)))
        for uri in uris:
            with suppress(FileOutsideTableError):
                yield name_in_table(self._path, uri)

    def _actions(self, version: int, kind: bytes) -> Iterator[Mapping[str, Any]]:
        data = storage.read(commit_file(self._path, version)) or b""
        return (json.loads(line) for line in data.splitlines() if kind in line)

    def _remove_version(self, version: int) -> None:
        """Delete the commit, the checkpoint, and the files that Delta and Hadoop add for them."""
        stem = f"{version:020d}"
        self._remove(f"{stem}.json", f"{stem}.checkpoint.parquet", f"{stem}.crc")
        self._checkpoints = [each for each in self._checkpoints if each != version]

    def _remove_checkpoints(self, written: float) -> None:
        """Delete most checkpoints of older versions, since each one lists all removed files.

        A checkpoint is deleted if the next one was written at or before the time `written`. The first and the
        newest checkpoint, one checkpoint per `_FEW_COMMITS` commits, and the checkpoints of other writers are
        always kept.
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
                storage.delete(self._path / "_delta_log" / each)


_log = logging.getLogger(__name__)

_TEMPORARY = ".penstock-*.tmp"
_FORGOTTEN_SECONDS = 3600.0
_SETTINGS = {
    # The configuration sets the retention. Additional commits would conflict with epochs.
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
    "spark.databricks.delta.vacuum.logging.enabled": "false",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "8",
}


class DeltaMaintenance:
    """Runs the maintenance of tables. Used by one thread."""

    def __init__(self, spark: SparkSession, executors: Executors, settings: MaintenanceSettings) -> None:
        self._spark = spark
        self._executors = executors
        self._settings = settings
        self._rests: dict[Path, Cooldown] = {}
        self._trimmers: dict[Path, LogTrimmer] = {}
        self._left: dict[Path, int] = {}
        """The last version of each table whose checkpoint was left to Delta."""

    def run(self, table: SharedTable, application: str) -> None:
        """Do the maintenance that is due. `application` is the table's transaction id. Compaction, which runs
        a Spark job, is followed by a pause before the next compaction.
        """
        with table.commit_lock:
            state = table.load()
        if state is not None:
            self._checkpoint(table.path, application, state)
            self._compact(table, state)
        self._vacuum(table.path)

    def _compact(self, table: SharedTable, state: DeltaState) -> None:
        rest = self._rests.setdefault(table.path, Cooldown())
        files = (
            files_to_compact(state, self._settings.compact_after)
            if self._settings.compact_after and rest.is_over
            else []
        )
        if files:
            with rest.after(), suppress(Unsupported):  # users have to run OPTIMIZE on such a table
                compact(table, state, files, self._executors)

    def _checkpoint(self, path: Path, application: str, state: DeltaState) -> None:
        """If a checkpoint is due, write it and trim the log."""
        every, version = self._settings.checkpoint_after, state.version
        trimmer = self._trimmer(path, state)
        is_due = every and version - max(trimmer.checkpoint, self._left.get(path, -1)) >= every
        if (
            not is_due or application in state.restored
        ):  # readers of the checkpoint would not know that the table was restored
            return
        try:
            write_checkpoint(path, state, trimmer.oldest_kept_ms(state, self._settings))
            trimmer.has(version)
            trimmer.trim(state, self._settings)
        except Unsupported:
            self._left[path] = version
            self._write_by_delta(path, version)

    def _trimmer(self, path: Path, state: DeltaState) -> LogTrimmer:
        found, table = self._trimmers.get(path), state.metadata.action.get("id")
        if found is None or found.table != table:
            self._left.pop(path, None)
            found = self._trimmers[path] = LogTrimmer(path, table)
        return found

    def _write_by_delta(self, path: Path, version: int) -> None:
        """Let Delta write a checkpoint. Delta then also removes expired parts of the log."""
        write_checkpoint_by_delta(self._spark, path)
        if newest_checkpoint(path) < version:  # Delta does not report why
            _log.warning("no checkpoint was written", extra={"path": str(path), "version": version})

    def _vacuum(self, path: Path) -> None:
        """Run VACUUM periodically. The modification time of a marker file records the last run."""
        keep, mark = self._settings.keep_seconds, path / "_delta_log" / ".penstock-vacuumed"
        try:
            is_due = time.time() - storage.modified_seconds(mark) > self._settings.vacuum_every_seconds
        except FileNotFoundError:
            is_due = False
            if not storage.is_directory(mark.parent):
                return
            storage.ensure_touched(mark)
        if not is_due:
            return
        remove_temporary(path)
        hours = None if keep is None else retained_hours(path, keep)
        if hours is not None:
            session = self._spark.newSession()
            for name, value in _SETTINGS.items():
                session.conf.set(name, value)
            with translated_errors(path, "vacuuming"):
                session.sql(f"VACUUM delta.{quoted(str(path))} RETAIN {hours} HOURS").collect()
        storage.ensure_touched(mark)


def retained_hours(path: Path, keep_seconds: float) -> int | None:
    """The retention in hours to pass to VACUUM, at least what the table requires; None if files must be kept
    forever.
    """
    summary = load_summary(path)
    seconds = (
        math.inf
        if summary is None
        else max(keep_seconds, required_retention_seconds(summary.metadata.properties))
    )
    return math.ceil(seconds / 3600) if seconds < math.inf else None


def remove_temporary(path: Path) -> None:
    """Remove temporary files of commits that a crash interrupted. A commit in progress takes less than an
    hour.
    """
    for file in storage.list_paths(path / "_delta_log", _TEMPORARY):
        try:
            if time.time() - storage.modified_seconds(file) > _FORGOTTEN_SECONDS:
                storage.delete(file)
        except FileNotFoundError:
            continue
