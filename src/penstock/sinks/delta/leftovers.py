"""Files of snapshots that lie in a Delta table's directory and are no part of it: what attempts that did not get to their end left.

A table that was copied anew has older versions, which people can still read: whatever a commit names stays, until VACUUM takes it away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from penstock.sinks.base import SnapshotFile
from penstock.sinks.delta.log import active_files
from penstock.spool import storage

_FILES = "snapshot-*.parquet"
_STAGED = "_staged_commits"
_NAMED = re.compile(rb'["/](snapshot-[0-9A-Za-z-]+\.parquet)"')


def unfinished_files(path: Path) -> set[Path]:
    """Those of snapshots that were begun and never part of the table at `path`.

    A file that a version needs is there now, or a commit says that it went; when that commit is gone from the log, so are the versions.
    """
    found = set(path.glob(_FILES)) - active_files(path)
    return found - {path / name for name in _named_files(path)} if found else set()


def remove_attempts(path: Path, files: Iterable[SnapshotFile]) -> None:
    """A snapshot has become part of the table, as `files`; other attempts at its chunks go."""
    prefixes = {file.name.rsplit("-", 2)[0] for file in files}
    found = {attempt for prefix in prefixes for attempt in path.glob(f"{prefix}-*.parquet")}
    for attempt in found - active_files(path):
        attempt.unlink(missing_ok=True)


def remove_half_made(path: Path) -> None:
    """What is left where the making of a table came to its end before the first commit: to Delta that is a table, which nobody can read.

    Whatever else lies there is somebody's, and stays.
    """
    log = path / "_delta_log"
    if not log.is_dir():
        return
    found = list(log.iterdir())
    staged = [entry for entry in found if entry.name == _STAGED and not any(entry.iterdir())]
    unfinished = [entry for entry in found if entry.name.startswith(".") and entry.is_file()]
    if len(found) == len(staged) + len(unfinished):
        for entry in unfinished:
            entry.unlink()
        for directory in (*staged, log):
            directory.rmdir()


def _named_files(path: Path) -> set[str]:
    """All that the commits of the log speak of."""
    names: set[str] = set()
    for commit in (path / "_delta_log").glob("*.json"):
        names.update(name.decode() for name in _NAMED.findall(storage.read_bytes(commit) or b""))
    return names
