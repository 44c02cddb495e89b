"""The only place of the spool that touches files.

Everything is a plain function over a local path, called as `storage.name(…)`, so that another filesystem can take its place later and a
test can stop the world between any two steps. A function that says *durable* has reached the disk when it returns.

Whatever the umask, directories are created with mode 0700 and files with 0600, since they hold rows of the source. `shared=True` leaves the
mode to the umask: for the tables of a lake, which other programs read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

_SYNCS_AT_ONCE = 8
_PRIVATE_DIRECTORY = 0o700
_PRIVATE_FILE = 0o600
_OTHERS = 0o077
_WRITABLE_BY_OTHERS = 0o022


class Entry(NamedTuple):
    """A directory as its parent lists it; the inode tells a directory from a later one of the same name, most of the time."""

    name: str
    inode: int


class Mark(NamedTuple):
    """Tells one version of a file from the next without reading it."""

    inode: int
    modified_ns: int
    size: int


def list_directories(path: Path) -> list[Entry]:
    """The directories in `path`, in no order; none if it does not exist."""
    try:
        with os.scandir(path) as entries:
            return [Entry(entry.name, entry.inode()) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def list_files(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    except FileNotFoundError:
        return []


def read_bytes(path: Path) -> bytes | None:
    """The whole file, or None if it is not there."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def mark(path: Path) -> Mark | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Mark(found.st_ino, found.st_mtime_ns, found.st_size)


def size_bytes(path: Path) -> int:
    """The bytes of all files below `path`; 0 if it does not exist, and files that vanish meanwhile do not count."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            found = mark(Path(folder, name))
            total += found.size if found else 0
    return total


def make_directory(path: Path, *, shared: bool = False) -> None:
    """Create `path` and its missing parents. Durable only after `sync_directory` of its parent.

    A missing parent is private if it is inside a private directory. Otherwise its mode is left to the umask, since it may also lead to
    directories that others read.
    """
    if shared:
        path.mkdir(parents=True, exist_ok=True)
        return
    missing = [path] if not path.is_dir() else []
    while missing and not missing[-1].parent.is_dir():
        missing.append(missing[-1].parent)
    if not missing:
        return
    is_private = not missing[-1].parent.stat().st_mode & _OTHERS
    for each in reversed(missing):
        mode = _PRIVATE_DIRECTORY if is_private or each == path else 0o777
        each.mkdir(mode, exist_ok=True)


def ensure_own_directory(path: Path) -> bool:
    """Create a directory where others may write beside it, such as the temporary one; False if this cannot be had for this user alone.

    A link is not followed. A directory that another user made, or could write to, may hold anything, and is not used.
    """
    with suppress(FileExistsError):
        path.mkdir(_PRIVATE_DIRECTORY)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & _WRITABLE_BY_OTHERS:
            return False
        os.fchmod(descriptor, _PRIVATE_DIRECTORY)
        return True
    finally:
        os.close(descriptor)


def ensure_file(path: Path) -> None:
    """Create an empty file if there is none.

    A file that exists is not opened: to close it would release the locks that this process has on it.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE))


def create_file(path: Path) -> pa.NativeFile:
    """A new file to write into. Durable only after `sync_files`, and `sync_directory` of its parent."""
    ensure_file(path)
    return pa.OSFile(str(path), mode="wb")


def write_bytes(path: Path, data: bytes, *, durable: bool = True, shared: bool = False) -> None:
    if not shared:
        ensure_file(path)
    with path.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def append_bytes(path: Path, data: bytes) -> None:
    """Add to the end of a file that is there, durably. A crash may leave a part of it."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Put `source` in the place of `target` in one step. Durable only after `sync_directory`."""
    source.replace(target)


def replace_bytes(path: Path, data: bytes, *, durable: bool = True, shared: bool = False) -> None:
    """Give the file `path` this content; a reader sees the old one or the new one."""
    make_directory(path.parent, shared=shared)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write_bytes(temporary, data, durable=durable, shared=shared)
    rename(temporary, path)
    if durable:
        sync_directory(path.parent)


def create_bytes(path: Path, data: bytes) -> bool:
    """Make the file `path` with this content, durably, if there is none; False if there is, whoever made it."""
    make_directory(path.parent)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write_bytes(temporary, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        remove_file(temporary)
    sync_directory(path.parent)
    return True


def is_open_to_others(path: Path) -> bool:
    """Whether the group or other users may use this file or directory; False if that cannot be found out."""
    try:
        return bool(path.stat().st_mode & _OTHERS)
    except OSError:
        return False


def touch(path: Path) -> None:
    """Make a file as new as now, if it is there."""
    with suppress(FileNotFoundError):
        os.utime(path)


def remove_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a directory and all that is in it; nothing happens if it is not there, or if someone else removes it meanwhile."""
    while path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def sync_file(path: Path) -> None:
    _sync(path, os.O_RDONLY)


def sync_files(paths: Sequence[Path]) -> None:
    _at_once(sync_file, paths)


def sync_directory(path: Path) -> None:
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_directories(paths: Sequence[Path]) -> None:
    _at_once(sync_directory, paths)


def _at_once(sync: Callable[[Path], None], paths: Sequence[Path]) -> None:
    """Several at a time: each waits for the disk, and one commit of its journal serves all that wait. Raises what any of them raised."""
    if len(paths) > 1:
        # An interpreter that is ending starts no more threads; then it is one by one.
        with suppress(RuntimeError), ThreadPoolExecutor(min(_SYNCS_AT_ONCE, len(paths)), thread_name_prefix="penstock-sync") as threads:
            list(threads.map(sync, paths))
            return
    for path in paths:
        sync(path)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
