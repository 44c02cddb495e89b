"""Private temporary and cache directories."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from penstock import storage
from penstock.storage.locks import exclusive, is_exclusive_held

_LOCK = "lock"
_PRIVATE_DIRECTORY = 0o700
_WRITABLE_BY_OTHERS = 0o022


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """Context manager for a new directory in `root`, which is deleted after the block. First removes the
    directories of killed processes.
    """
    storage.ensure_directory(root)
    directory = root / secrets.token_hex(8)
    with ExitStack() as stack:
        # One process at a time does this, since a directory that is created but not locked yet would look
        # abandoned.
        with exclusive(root / _LOCK):
            for other in storage.list_paths(root):
                if storage.is_directory(other) and not is_exclusive_held(other / _LOCK):
                    storage.discard_tree(other)
            storage.ensure_directory(directory)
            stack.callback(storage.discard_tree, directory)
            stack.enter_context(exclusive(directory / _LOCK))
        yield directory


def user_temporary_directory() -> Path | None:
    """Return this user's directory inside the system's temporary one; None if another user owns that
    directory or may write to it.
    """
    path = Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}"
    with suppress(OSError):
        if _ensure_owned(path):
            return path
    return None


def user_cache_directory() -> Path | None:
    """Return a writable directory for downloaded and generated programs; None if there is none."""
    base = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(base) if base else Path.home() / ".cache") / "penstock"
    with suppress(OSError):
        storage.ensure_directory(
            cache, shared=True
        )  # a server that runs as another user starts programs from it
        if os.access(cache, os.W_OK) and cache.stat().st_uid == os.geteuid():
            return cache
    return user_temporary_directory()


def install_directory(target: Path, files: dict[str, bytes], *, modes: dict[str, int]) -> None:
    """Create the directory `target` with `files` in one step. A directory that exists but lacks one of the
    files is replaced. If another process creates it at the same time, either directory may remain.

    `modes` has the permissions of the files and directories that other users need; all others stay private.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    for name, data in files.items():
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        (draft / name).write_bytes(data)
    for name, mode in modes.items():
        (draft / name).chmod(mode)
    try:
        draft.rename(target)
    except OSError:
        try:
            _replace_incomplete(target, draft, files)
        finally:
            storage.discard_tree(draft)


def _replace_incomplete(target: Path, draft: Path, names: Iterable[str]) -> None:
    """Replace `target` by `draft` if it lacks one of `names`: programs that delete old temporary files leave
    the directories. Only one process at a time does this, so that it does not remove a directory that another
    process has just installed.
    """
    with exclusive(target.with_name(f".{target.name}.lock")):
        if all((target / name).exists() for name in names):
            return
        storage.discard_tree(target)
        draft.rename(target)


def is_case_sensitive(directory: Path) -> bool:
    """Whether names in `directory` may differ in case alone. Creates the directory if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".penstock-case-", dir=directory) as probe:
        path = Path(probe.name)
        return not path.with_name(path.name.swapcase()).exists()


def _ensure_owned(path: Path) -> bool:
    """Create a directory for this user alone, in a place where others may write; returns False if that is
    impossible.

    Links are not followed. A directory that another user created or could write to may contain anything, so
    it is not used.
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
