"""A directory for files that nobody needs any more when the process is gone, however it goes."""

from __future__ import annotations

import fcntl
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock.spool import storage

_LOCK = "lock"


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """A new directory in `root`, for the length of the block. What killed processes left there is removed first."""
    storage.make_directory(root)
    directory = root / secrets.token_hex(8)
    with ExitStack() as held:
        # One at a time: a directory that is made and not locked yet would look as if it were left over.
        storage.ensure_file(root / _LOCK)
        with (root / _LOCK).open("r+b") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            for left in root.iterdir():
                if left.is_dir() and not _is_locked(left / _LOCK):
                    shutil.rmtree(left, ignore_errors=True)
            storage.make_directory(directory)
            held.callback(shutil.rmtree, directory, ignore_errors=True)
            storage.ensure_file(directory / _LOCK)
            fcntl.flock(held.enter_context((directory / _LOCK).open("r+b")), fcntl.LOCK_EX)
        yield directory


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
