"""File access: the only package that reads, writes, lists or locks files.

The operations are functions of local paths, called as `storage.put(…)`. An object store would be a second
implementation of `read`, `put`, `create`, `list_files`, `delete` and `open_output`, chosen by the location's
scheme; no other package depends on the file system.

Durable means that the data survives a power failure once the function has returned. The docstring of a
function that is not durable names the sync that it needs. The caller runs the syncs, because one sync can
serve several files.

Whatever the umask, directories get mode 0700 and files 0600, since they hold rows of the source.
`shared=True` leaves the mode to the umask: for target tables, which other programs read.

Outside this package: libraries that open a path themselves. These are pyarrow.parquet (which reads footers
and ranges on its own), Spark and the JVM, the SQL files of the package itself (`importlib.resources`), and
the test servers in `penstock.testing`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

import pyarrow as pa

_PARALLEL_SYNCS = 8
_PRIVATE_DIRECTORY = 0o700
_PRIVATE_FILE = 0o600
_GROUP_AND_OTHERS = 0o077
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class LinksUnsupportedError(OSError):
    """The file system has no hard links, so a file cannot be created atomically."""


class DirectoryEntry(NamedTuple):
    """A directory in its parent's listing.

    The inode usually distinguishes it from a later directory of the same name.
    """

    name: str
    inode: int


class FileVersion(NamedTuple):
    """Identifies the version of a file without reading it: at least one of these values differs between two
    versions.
    """

    inode: int
    modified_ns: int
    size: int


# --- reading


def read(path: Path) -> bytes | None:
    """Return the content of a file, or None if it does not exist."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file that must exist, such as one that a user wrote.

    Raises OSError or UnicodeDecodeError.
    """
    return path.read_text(encoding="utf-8")


def open_input(path: Path) -> BinaryIO:
    """Open a file that is too large to read at once. Raises FileNotFoundError."""
    return path.open("rb")


def exists(path: Path) -> bool:
    return path.exists()


def is_directory(path: Path) -> bool:
    return path.is_dir()


def file_version(path: Path) -> FileVersion | None:
    """Return the version of a file, or None if it does not exist."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return FileVersion(found.st_ino, found.st_mtime_ns, found.st_size)


def size_bytes(path: Path) -> int:
    """The size of a file. Raises FileNotFoundError."""
    return path.stat().st_size


def modified_seconds(path: Path) -> float:
    """The time of the last modification, in seconds since 1970. Raises FileNotFoundError."""
    return path.stat().st_mtime


def tree_size_bytes(path: Path) -> int:
    """The size of all files below `path`; 0 if it does not exist.

    Files that vanish during the walk do not count.
    """
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            found = file_version(Path(folder, name))
            total += found.size if found else 0
    return total


def free_bytes(path: Path) -> int:
    """The free space of the file system that holds `path`."""
    return shutil.disk_usage(path).free


def is_open_to_others(path: Path) -> bool:
    """Whether the group or other users have any permission on `path`; False if that cannot be determined."""
    try:
        return bool(path.stat().st_mode & _GROUP_AND_OTHERS)
    except OSError:
        return False


# --- listing


def list_directories(path: Path) -> list[DirectoryEntry]:
    """The directories in `path`, unordered; empty if it does not exist. Links are left out."""
    try:
        with os.scandir(path) as entries:
            return [
                DirectoryEntry(entry.name, entry.inode())
                for entry in entries
                if entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []


def list_files(path: Path) -> list[str]:
    """The sorted names of the files in `path`; empty if it does not exist. Links are left out."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    except FileNotFoundError:
        return []


def list_paths(path: Path, pattern: str | None = None) -> list[Path]:
    """The sorted paths of all files and directories in `path`, or of those below it that match a glob
    pattern; empty if `path` does not exist.
    """
    if pattern is not None:
        return sorted(path.glob(pattern))
    with suppress(FileNotFoundError):
        return sorted(path.iterdir())
    return []


# --- writing


def put(path: Path, data: bytes | Iterable[bytes], *, durable: bool = True, shared: bool = False) -> None:
    """Write a file atomically: a reader sees the old content or the new one. Creates missing directories."""
    ensure_directory(path.parent, shared=shared)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write(temporary, data, durable=durable, shared=shared)
    rename(temporary, path)
    if durable:
        sync_directory(path.parent)


def create(path: Path, data: bytes, *, shared: bool = False) -> bool:
    """Create a file atomically and durably; returns False if it exists already. The directory must exist.

    Raises LinksUnsupportedError if the file system has no hard links.
    """
    temporary = path.with_name(f".penstock-{uuid4().hex}.tmp")
    try:
        write(temporary, data, shared=shared)
        is_created = link(temporary, path)
    finally:
        # Cleaners remove temporary files that are left over; a failure here must not make a successful commit
        # look failed.
        with suppress(OSError):
            temporary.unlink()
    if is_created:
        sync_directory(path.parent)
    return is_created


@contextmanager
def open_output(path: Path) -> Iterator[pa.NativeFile]:
    """Context manager to write a large private file atomically and durably: the file appears under its name
    when the block ends without an error.
    """
    temporary = path.with_name(f".{path.name}-{uuid4().hex}.tmp")
    try:
        with open_new(temporary) as file:
            yield file
        sync_file(temporary)
        rename(temporary, path)
    except BaseException:
        delete(temporary)
        raise
    sync_directory(path.parent)


def open_new(path: Path) -> pa.NativeFile:
    """Open a private file for writing in place.

    Durable only after `sync_file`, and `sync_directory` of its parent.
    """
    ensure_file(path)
    return pa.OSFile(str(path), mode="wb")


def write(path: Path, data: bytes | Iterable[bytes], *, durable: bool = True, shared: bool = False) -> None:
    """Write a file in place. Only for names that readers do not open before a `rename`.

    Does not sync the directory.
    """
    if not shared:
        ensure_file(path)
    with path.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def append(path: Path, data: bytes) -> None:
    """Append to an existing file, durably. A crash may leave a part of `data`."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Replace `target` by `source` in one step. Durable only after `sync_directory`."""
    source.replace(target)


def link(source: Path, target: Path) -> bool:
    """Make `target` a hard link to `source`; returns False if `target` exists and is another file.

    Durable only after `sync_directory`.

    Raises LinksUnsupportedError if the file system has no hard links.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        # An NFS client that lost the server's reply repeats the request, although the link was created.
        return target.samefile(source)
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise LinksUnsupportedError(error.errno, error.strerror) from error
        raise
    return True


def is_link_of(path: Path, original: Path) -> bool:
    """Whether two names are the same file; False if `path` does not exist."""
    return path.is_file() and path.samefile(original)


def ensure_directory(path: Path, *, shared: bool = False) -> None:
    """Create `path` and its missing parents. Durable only after `sync_directory` of its parent.

    A missing parent is private if it is inside a private directory. Otherwise its mode is left to the umask,
    because it may also hold shared directories.
    """
    if shared:
        path.mkdir(parents=True, exist_ok=True)
        return
    missing = [path] if not path.is_dir() else []
    while missing and not missing[-1].parent.is_dir():
        missing.append(missing[-1].parent)
    if not missing:
        return
    is_private = not missing[-1].parent.stat().st_mode & _GROUP_AND_OTHERS
    for each in reversed(missing):
        mode = _PRIVATE_DIRECTORY if is_private or each == path else 0o777
        each.mkdir(mode, exist_ok=True)


def ensure_file(path: Path) -> None:
    """Create an empty private file if none exists.

    An existing file is not opened, because closing it would release the POSIX locks that this process holds
    on it.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE))


def open_append(path: Path) -> BinaryIO:
    """Open a private file for appending, such as a program's log. Not durable."""
    ensure_file(path)
    return path.open("ab")


def touch(path: Path) -> None:
    """Set a file's modification time to now, if it exists."""
    with suppress(FileNotFoundError):
        os.utime(path)


def ensure_touched(path: Path) -> None:
    """Create an empty shared file, or set its modification time to now."""
    path.touch()


# --- deleting


def delete(path: Path) -> None:
    """Delete a file, if it exists."""
    path.unlink(missing_ok=True)


def delete_tree(path: Path) -> None:
    """Delete a directory with its content, if it exists. Another process may delete it at the same time."""
    while path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def discard_tree(path: Path) -> None:
    """Delete a directory with its content as far as possible, and ignore errors. For temporary data, where a
    failure must not hide another error.
    """
    shutil.rmtree(path, ignore_errors=True)


def delete_empty_directory(path: Path) -> None:
    """Delete a directory. Raises OSError if it is not empty."""
    path.rmdir()


# --- syncing


def sync_file(path: Path) -> None:
    _sync(path, os.O_RDONLY)


def sync_files(paths: Sequence[Path]) -> None:
    _sync_in_parallel(sync_file, paths)


def sync_directory(path: Path) -> None:
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_directories(paths: Sequence[Path]) -> None:
    _sync_in_parallel(sync_directory, paths)


def _sync_in_parallel(sync: Callable[[Path], None], paths: Sequence[Path]) -> None:
    """Sync several paths at a time: each sync waits for the disk, and one commit of the file system's journal
    completes all waiting syncs.

    Raises the first error.
    """
    if len(paths) > 1:
        # An interpreter that is shutting down starts no threads (RuntimeError); then sync one by one.
        with (
            suppress(RuntimeError),
            ThreadPoolExecutor(
                min(_PARALLEL_SYNCS, len(paths)), thread_name_prefix="penstock-sync"
            ) as threads,
        ):
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
