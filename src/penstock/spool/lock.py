"""The spool's single writer.

The lock is the operating system's, on the open file: it goes with the process that holds it, however that ends. Beware that a child made
by a bare fork shares it; children started by exec do not.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.errors import SpoolLockedError
from penstock.spool import storage
from penstock.spool.layout import SpoolLayout


def is_locked(root: Path) -> bool:
    """Whether somebody holds the lock now. A writer that ended in order has left the file empty, and is not disturbed by asking."""
    try:
        descriptor = os.open(SpoolLayout(root).lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        if not os.pread(descriptor, 1, 0):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class SpoolLock:
    """Hold it around everything that writes segments. Taking it twice fails, also within one process."""

    def __init__(self, root: Path) -> None:
        self._path = SpoolLayout(root).lock
        self._descriptor: int | None = None

    def acquire(self) -> None:
        storage.make_directory(self._path.parent)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise SpoolLockedError(
                f"process {holder} writes to the spool", hint="stop the other capture, or give this one a spool of its own"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go; nothing happens if it is not held. The file stays, since removing it would let two in."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
