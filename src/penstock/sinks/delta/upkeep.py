"""What keeps a Delta table quick to read and its directory from growing for ever: compaction, checkpoints, VACUUM.

Done by one thread beside the epochs, table by table. Whether something is due is read off the table itself, so it makes no difference how
often a run ends. Nothing of it changes a row or moves a position; what fails is due again at the next look.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.sinks.delta.checkpoints import have_checkpoint_written, write_checkpoint
from penstock.sinks.delta.compaction import SharedTable, compact, costly_files
from penstock.sinks.delta.log import open_log
from penstock.sinks.delta.retention import asked_seconds
from penstock.sinks.delta.sessions import failing
from penstock.sinks.delta.state import DeltaState, Unsupported, newest_checkpoint
from penstock.sinks.delta.trimming import LogTrimmer
from penstock.sinks.executors import Executors
from penstock.sinks.names import quoted
from penstock.sinks.upkeep import Rest, Upkeep

_log = logging.getLogger(__name__)

_TEMPORARY = ".penstock-*.tmp"
_FORGOTTEN_SECONDS = 3600.0
_SETTINGS = {
    # How long is long enough, the configuration says; and commits of its own would only be in the way of epochs.
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
    "spark.databricks.delta.vacuum.logging.enabled": "false",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "8",
}


class DeltaUpkeep:
    """Used by one thread."""

    def __init__(self, spark: SparkSession, executors: Executors, upkeep: Upkeep) -> None:
        self._spark = spark
        self._executors = executors
        self._upkeep = upkeep
        self._rests: dict[Path, Rest] = {}
        self._trimmers: dict[Path, LogTrimmer] = {}
        self._left: dict[Path, int] = {}
        """Versions of which Delta was to write a checkpoint."""

    def keep(self, table: SharedTable, application: str) -> None:
        """Do what is due for the table, whose position is kept under that name. Only what takes a job of Spark's, it rests after."""
        with table.turn:
            state = table.look()
        if state is not None:
            self._checkpoint(table.path, application, state)
            self._compact(table, state)
        self._vacuum(table.path)

    def _compact(self, table: SharedTable, state: DeltaState) -> None:
        rest = self._rests.setdefault(table.path, Rest())
        files = costly_files(state, self._upkeep.compact_after) if self._upkeep.compact_after and rest.is_over else []
        if files:
            with rest.after(), suppress(Unsupported):  # such a table is OPTIMIZE's
                compact(table, state, files, self._executors)

    def _checkpoint(self, path: Path, application: str, state: DeltaState) -> None:
        """What is not kept of the log, goes with it."""
        every, version = self._upkeep.checkpoint_after, state.version
        trimmer = self._trimmer(path, state)
        is_due = every and version - max(trimmer.checkpoint, self._left.get(path, -1)) >= every
        if not is_due or application in state.restored:  # whoever begins with the checkpoint would not know that it was
            return
        try:
            write_checkpoint(path, state, trimmer.oldest_kept_ms(state, self._upkeep))
            trimmer.has(version)
            trimmer.trim(state, self._upkeep)
        except Unsupported:
            self._left[path] = version
            self._have_written(path, version)

    def _trimmer(self, path: Path, state: DeltaState) -> LogTrimmer:
        found, table = self._trimmers.get(path), state.metadata.action.get("id")
        if found is None or found.table != table:
            self._left.pop(path, None)
            found = self._trimmers[path] = LogTrimmer(path, table)
        return found

    def _have_written(self, path: Path, version: int) -> None:
        """By Delta, which takes away with that what is too old of the log."""
        have_checkpoint_written(self._spark, path)
        if newest_checkpoint(path) < version:  # Delta keeps to itself why
            _log.warning("no checkpoint was written", extra={"path": str(path), "version": version})

    def _vacuum(self, path: Path) -> None:
        """Once in a while; when it was done last, the time of a file tells that is nobody else's."""
        keep, mark = self._upkeep.keep_seconds, path / "_delta_log" / ".penstock-vacuumed"
        try:
            is_due = time.time() - mark.stat().st_mtime > self._upkeep.vacuum_every_seconds
        except FileNotFoundError:
            is_due = False
            if not mark.parent.is_dir():
                return
            mark.touch()
        if not is_due:
            return
        remove_temporary(path)
        hours = None if keep is None else retained_hours(path, keep)
        if hours is not None:
            session = self._spark.newSession()
            for name, value in _SETTINGS.items():
                session.conf.set(name, value)
            with failing(path, "vacuuming"):
                session.sql(f"VACUUM delta.{quoted(str(path))} RETAIN {hours} HOURS").collect()
        mark.touch()


def retained_hours(path: Path, keep_seconds: float) -> int | None:
    """How long VACUUM leaves alone what is gone from the table, which may ask for more than that itself; None: for ever."""
    log = open_log(path)
    seconds = math.inf if log is None else max(keep_seconds, asked_seconds(log.metadata().configuration))
    return math.ceil(seconds / 3600) if seconds < math.inf else None


def remove_temporary(path: Path) -> None:
    """Commits that a crash left unfinished. One that is being made now is not an hour old."""
    for file in (path / "_delta_log").glob(_TEMPORARY):
        try:
            if time.time() - file.stat().st_mtime > _FORGOTTEN_SECONDS:
                file.unlink()
        except FileNotFoundError:
            continue
