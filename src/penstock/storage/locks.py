"""File locks between processes of one machine.

A lock belongs to the open file, so the operating system releases it whenever its process ends. A child made
by a bare fork shares the lock; children started by exec do not. Lock files are never deleted: a second
process could then lock a new file of that name.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock import storage
from penstock.errors import PenstockError

_WAIT_SECONDS = 0.1


class FileLock:
    """An exclusive lock on a file; the file contains the process id of the holder. A second acquisition
    fails, even within the same process.

    With `jvm`, it also takes a POSIX record lock, the kind that a JVM uses. `refusal` returns the error to
    raise, given the holder's process id.
    """

    def __init__(self, path: Path, refusal: Callable[[str], PenstockError], *, jvm: bool = False) -> None:
        self._path = path
        self._refusal = refusal
        self._jvm = jvm
        self._descriptor: int | None = None

    def acquire(self) -> None:
        storage.ensure_directory(self._path.parent)
        storage.ensure_file(self._path)
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            self._lock(descriptor)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise self._refusal(holder) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def wait(self, timeout_seconds: float) -> None:
        """Acquire the lock, waiting up to `timeout_seconds` until its holder releases it.

        Does nothing if this object holds it already.
        """
        deadline = time.monotonic() + timeout_seconds
        while self._descriptor is None:
            try:
                self.acquire()
            except PenstockError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_WAIT_SECONDS)

    def release(self) -> None:
        """Release the lock, if this object holds it."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if self._jvm:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_file_lock_held(path: Path) -> bool:
    """Whether a process holds the `FileLock` on this file.

    `release` empties the file. This check locks the file for a moment, but never an empty one, so it does not
    disturb a process that acquires a released lock.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
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


def is_locked_by_jvm(path: Path) -> bool:
    """Whether a JVM holds a lock on this file."""
    try:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):
        return True
    return False


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` during the block; waits while another process holds it. The file does
    not name the holder.
    """
    storage.ensure_file(path)
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_exclusive_held(path: Path) -> bool:
    """Whether a process is inside `exclusive(path)`; False if the file does not exist."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
