"""Files of epochs that lie in an Iceberg table's directory and are no part of it: what attempts that did not get to their end left.

An attempt writes its files after it has looked at the table, and its commit counts only if the table still has the snapshot that it had
then. So whoever wrote files before some snapshot came, and has not committed them by then, never will. A rewrite may commit later; but
rewrites are made by the thread that also looks for leftovers, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.sinks.iceberg.catalog import LoadedTable
from penstock.sinks.iceberg.merging import MERGED

_FILES = ("epoch-*.parquet", f"{MERGED}-*.parquet")


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """Those that lay in the directory at one time, and the snapshot that the table had after that."""

    files: Mapping[str, Path]
    snapshot: int | None

    def are_settled(self, table: LoadedTable) -> bool:
        """Whether what is no part of `table`, which has just been refreshed, will not become one."""
        return _snapshot(table) != self.snapshot

    def remove_unnamed(self, spark: SparkSession, name: str) -> int:
        """Remove what none of the snapshots names that the table `name` has; how many that were."""
        spark.sql(f"REFRESH TABLE {name}")
        rows = spark.table(f"{name}.all_files").select("file_path").distinct().collect()
        unnamed = self.files.keys() - {str(row["file_path"]).rpartition("/")[2] for row in rows}
        for each in unnamed:
            self.files[each].unlink(missing_ok=True)
        return len(unnamed)


def owns_directory(table: LoadedTable) -> bool:
    """Whether nothing of another table can lie in its directory; in most catalogs one that is renamed leaves its files where they are."""
    return str(table.java.operations().getClass().getSimpleName()) == "HadoopTableOperations"


def find_files(table: LoadedTable, before: float) -> FoundFiles:
    """The files of epochs in the table's own directory that were last written to before that time."""
    found = {path.name: path for pattern in _FILES for path in table.directory.glob(pattern) if _written(path) < before}
    table.java.refresh()  # after that: files that came since are not among those found
    return FoundFiles(found, _snapshot(table))


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # an attempt has taken back its own
        return math.inf


def _snapshot(table: LoadedTable) -> int | None:
    snapshot = table.java.currentSnapshot()
    return None if snapshot is None else int(snapshot.snapshotId())
