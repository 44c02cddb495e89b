"""Temporary files in memory: on a disk, the tests mostly wait for fsync.

Everything goes there: pytest's own directories, the data of servers, Spark's files, and what child processes
put into their temporary directory. A TMPDIR that is set wins. A run that fails leaves its files until the
next run starts.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")
_PREFIX = "penstock-tests-"
_NEEDED_BYTES = 4 << 30


def pytest_configure() -> None:
    if "TMPDIR" in os.environ or not _has_room():
        return
    _remove_leftovers()
    directory = _MEMORY / f"{_PREFIX}{os.getpid()}"
    directory.mkdir(mode=0o755, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    os.environ.setdefault("SPARK_LOCAL_DIRS", str(directory))
    # Registered before any server is started, so it runs after they have ended.
    atexit.register(_remove, directory)


def pytest_sessionfinish(exitstatus: int) -> None:
    if exitstatus != pytest.ExitCode.OK:
        atexit.unregister(_remove)


def _has_room() -> bool:
    """Containers often have a /dev/shm of 64 MB, and the size of a large one may exceed the
    available memory.
    """
    if not os.access(_MEMORY, os.W_OK):
        return False
    return min(shutil.disk_usage(_MEMORY).free, _available_bytes()) >= _NEEDED_BYTES


def _available_bytes() -> int:
    found = re.search(
        r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE
    )
    return int(found[1]) << 10 if found else 0


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _remove_leftovers() -> None:
    """Remove the directories of this user's runs whose process has ended."""
    for directory in _MEMORY.glob(f"{_PREFIX}*"):
        pid = directory.name.removeprefix(_PREFIX)
        if directory.stat().st_uid == os.geteuid() and not Path("/proc", pid).exists():
            _remove(directory)
