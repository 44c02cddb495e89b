"""What keeps Iceberg tables quick to read, and their metadata small, between epochs.

Every epoch with updates leaves a file of equality deletes, which whoever reads the table has to take in; so, after a number of them, the
data files are rewritten without the rows that are gone. Files that cannot hold such a row, by their bounds, are left alone; the deletes
would stay beside them for ever, so those that reach no file are taken out. Every epoch leaves a small file of rows too; after a number of
those, they are made one. Every epoch leaves a snapshot, which every commit lists; so those that are old or too many are expired. Epochs
that did not get to their end leave files, which are looked for once a day. A rewrite says no position: by the time that it is committed,
the table may hold more than when it began.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from threading import Lock

from pyspark.sql import SparkSession

from penstock.errors import SinkError
from penstock.foreign import describe
from penstock.sinks.iceberg.catalog import LoadedTable, TableMovedError, failing
from penstock.sinks.iceberg.leftovers import FoundFiles, find_files, owns_directory
from penstock.sinks.iceberg.rewriting import Merge, rewrite_files

_log = logging.getLogger(__name__)

_REST = 10
"""A rewrite that took a second is not followed by another for ten: however large the table, it takes no more than a tenth of the time."""
EXPIRE_EVERY = 100
KEPT_SNAPSHOTS = 5
"""So many stay however old: by these the position is known, whatever others put on top of ours."""
_TIDY_SECONDS = 86_400.0
"""To look for files that are no part of a table, all that it names are listed."""

_SMALL_BYTES = 16 * 1024 * 1024
"""A file below that is made one with others. A larger one is rewritten only without rows that are gone."""
_TARGET_BYTES = ("write.target-file-size-bytes", 512 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Maintenance:
    """When a table is looked after."""

    delete_files: int = 64
    """A table with so many files of deletes, or so many files of rows more than after the last time, is rewritten; 0: never."""
    keep_seconds: float = 3600.0
    """Snapshots older than this expire."""
    expire_every: int = EXPIRE_EVERY
    """With so many snapshots more than after the last time; 0: never."""
    versions: int = 1000
    """At most so many snapshots are kept, however young; but in any case those younger than `hold_seconds`."""
    hold_seconds: float = 600.0


class Maintainer:
    """Looks after one table. Called by one thread, beside the one that writes to it, which holds `turn` meanwhile."""

    def __init__(self, spark: SparkSession, name: str, maintenance: Maintenance, turn: Lock, merge: Merge) -> None:
        """`name` is the table's in SQL."""
        self._spark = spark
        self._name = name
        self._maintenance = maintenance
        self._turn = turn
        self._merge = merge
        self._rests_until = 0.0
        self._kept = 0
        self._data_files = 0
        self._found: FoundFiles | None = None
        self._tidy_until = 0.0

    def is_due(self, table: LoadedTable) -> bool:
        """Whether there is something to do for the table."""
        return self._is_slow(table) or self._is_long(table)

    def keep(self, table: LoadedTable) -> None:
        """Do what is due for the table as it is now. What fails is tried again after a later epoch: no row depends on it."""
        for is_due, work in ((self._is_long, self._expire), (self._is_slow, self._rewrite)):
            try:
                if is_due(table):
                    work(table)
            except (SinkError, TableMovedError) as error:
                _log.warning("table not maintained", extra={"location": table.location, "error": describe(error)})

    def _is_slow(self, table: LoadedTable) -> bool:
        count = max(table.delete_files or 0, table.data_files - self._data_files)
        return 0 < self._maintenance.delete_files <= count and time.monotonic() >= self._rests_until

    def _rewrite(self, table: LoadedTable) -> None:
        started = time.monotonic()
        try:
            with failing(f"rewriting {table.location}"):
                self._rewrite_files(table)
        finally:
            # Also after one that failed: what is given up when it takes too long would be begun again at once, for ever.
            took = time.monotonic() - started
            self._rests_until = time.monotonic() + _REST * took
        _log.info("table rewritten", extra={"location": table.location, "seconds": round(took, 3)})

    def _rewrite_files(self, table: LoadedTable) -> None:
        rewrite_files(self._spark, table, _small_bytes(table), self._turn, self._merge)
        table.java.refresh()
        self._data_files = int(table.java.currentSnapshot().summary().get("total-data-files") or 0)

    def _is_long(self, table: LoadedTable) -> bool:
        every = self._maintenance.expire_every
        return bool(every) and len(table.base.snapshots()) >= self._kept + every

    def _expire(self, table: LoadedTable) -> None:
        with failing(f"expiring snapshots of {table.location}"):
            table.java.refresh()
            before = int(self._oldest_kept(table) * 1000)
            table.java.expireSnapshots().expireOlderThan(before).retainLast(KEPT_SNAPSHOTS).cleanExpiredFiles(True).commit()
            table.java.refresh()
            self._kept = len(table.java.operations().current().snapshots())
            self._tidy(table)

    def _tidy(self, table: LoadedTable) -> None:
        """What is found one time and has become no part of the table by the next is removed."""
        if not owns_directory(table):
            return
        if self._found is None and time.monotonic() >= self._tidy_until:
            self._found = find_files(table, time.time() - max(self._maintenance.keep_seconds, self._maintenance.hold_seconds))
        elif self._found is not None and self._found.are_settled(table):
            removed = self._found.remove_unnamed(self._spark, self._name)
            self._found, self._tidy_until = None, time.monotonic() + _TIDY_SECONDS
            _log.info("files of unfinished epochs removed", extra={"location": table.location, "files": removed})

    def _oldest_kept(self, table: LoadedTable) -> float:
        """Snapshots from before this moment expire."""
        chosen, now = self._maintenance, time.time()
        found = table.java.operations().current().snapshots()
        beyond = len(found) - chosen.versions
        crowded = 0.0 if beyond <= 0 else found[beyond].timestampMillis() / 1000
        return max(now - chosen.keep_seconds, min(crowded, now - chosen.hold_seconds))


def _small_bytes(table: LoadedTable) -> int:
    """Iceberg's own bound is three quarters of what it makes files to be, and would have nearly all of a table written each time."""
    name, default = _TARGET_BYTES
    return min(_SMALL_BYTES, int(table.base.properties().get(name) or default) * 3 // 4)
