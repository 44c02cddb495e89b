"""The spool's single writer, and the single reader of a name.

A lock is the operating system's, on the open file: it goes with the process that holds it, however that ends. Beware that a child made
by a bare fork shares it; children started by exec do not.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from typing_extensions import override

from penstock.errors import ConsumerBusyError, LockWaitError, PenstockError, SpoolLockedError
from penstock.spool import storage
from penstock.spool.layout import SpoolLayout

_WAIT_SECONDS = 0.1


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


class FileLock:
    """Taking it twice fails, also within one process. `refusal` is given who has it."""

    def __init__(self, path: Path, refusal: Callable[[str], PenstockError]) -> None:
        self._path = path
        self._refusal = refusal
        self._descriptor: int | None = None

    def acquire(self) -> None:
        storage.make_directory(self._path.parent)
        storage.ensure_file(self._path)
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            self._take(descriptor)
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

    def wait(self, patience_seconds: float) -> None:
        """Take it; a holder that is just ending is waited for. Nothing happens if it is held already."""
        deadline = time.monotonic() + patience_seconds
        while self._descriptor is None:
            try:
                self.acquire()
            except PenstockError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_WAIT_SECONDS)

    def release(self) -> None:
        """Let go; nothing happens if it is not held. The file stays, since removing it would let two in."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class SpoolLock(FileLock):
    """Hold it around everything that writes segments."""

    def __init__(self, root: Path) -> None:
        hint = "stop the other capture, or give this one a spool of its own"
        super().__init__(SpoolLayout(root).lock, lambda holder: SpoolLockedError(f"process {holder} writes to the spool", hint=hint))


class ConsumerLock(FileLock):
    """Hold it around everything that reads and releases under one name.

    A pipeline holds the same file by its JVM, which knows locks of another kind, so that both kinds are taken here.
    """

    def __init__(self, root: Path, consumer: str) -> None:
        def refusal(holder: str) -> PenstockError:
            return ConsumerBusyError(
                f"process {holder} reads the spool at {root} as consumer {consumer} already",
                hint='stop the other query, or give each of them a name of its own: .option("consumer", …)',
            )

        self._root = root
        super().__init__(SpoolLayout(root).consumer_lock(consumer), refusal)

    @override
    def acquire(self) -> None:
        storage.make_directory(self._root)
        super().acquire()

    @override
    def _take(self, descriptor: int) -> None:
        super()._take(descriptor)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class MomentLock(FileLock):
    """Hold it while a capture by polling takes a moment of the source: the later moment must have the later position."""

    def __init__(self, root: Path) -> None:
        super().__init__(SpoolLayout(root).moment_lock, lambda holder: LockWaitError(f"process {holder} takes a moment of the source"))
