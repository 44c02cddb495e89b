"""File operations: durability, atomicity and permissions."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import storage
from penstock.spool.ownership import SpoolLock

AT_THE_END = """
import atexit
import sys
from collections.abc import Iterator
from pathlib import Path
from penstock import storage
from penstock.spool.ownership import SpoolLock

atexit.register(lambda: print("synced", storage.sync_files([Path(path) for path in sys.argv[1:]])))
"""


def files(root: Path, count: int) -> list[Path]:
    paths = [root / str(number) for number in range(count)]
    for path in paths:
        path.write_bytes(b"x")
    return paths


@pytest.mark.parametrize("count", [0, 1, 2, 30])
def test_every_file_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(storage, "sync_file", synced.append)
    paths = files(tmp_path, count)
    storage.sync_files(paths)
    assert sorted(synced) == sorted(paths)


@pytest.mark.parametrize("count", [1, 30])
def test_one_that_fails_fails_all(tmp_path: Path, count: int) -> None:
    paths = files(tmp_path, count)
    paths[-1].unlink()
    with pytest.raises(FileNotFoundError):
        storage.sync_files(paths)


def test_it_works_in_an_interpreter_that_is_ending(tmp_path: Path) -> None:
    """A program that ends without closing its stream: the capture still sends its last confirmation."""
    command = [sys.executable, "-c", AT_THE_END, *map(str, files(tmp_path, 3))]
    environment = {**os.environ, "PYTHONPATH": str(Path(storage.__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("synced None\n", "")


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> set[tuple[str, int]]:
    return {
        ("directory" if path.is_dir() else "file", stat.S_IMODE(path.stat().st_mode))
        for path in root.rglob("*")
    }


@pytest.mark.usefixtures("open_umask")
def test_directories_and_files_are_for_their_owner_only_under_any_umask(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    root = tmp_path / "above" / "private"
    storage.ensure_directory(root)
    storage.ensure_directory(root / "a" / "b")
    storage.write(root / "written", b"x")
    storage.put(root / "c" / "replaced", b"x")
    storage.ensure_directory(root / "d")
    storage.create(root / "d" / "created", b"x")
    storage.ensure_file(root / "empty")
    with storage.open_new(root / "opened") as file:
        file.write(b"x")
    with SpoolLock(root):
        pass
    assert modes(root) == {("directory", 0o700), ("file", 0o600)}
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(root.parent.stat().st_mode) == 0o777, "it may lead to a lake as well"


@pytest.mark.usefixtures("open_umask")
def test_files_for_other_readers_follow_the_umask(tmp_path: Path) -> None:
    storage.ensure_directory(tmp_path / "lake" / "table", shared=True)
    storage.write(tmp_path / "lake" / "written", b"x", shared=True)
    storage.put(tmp_path / "lake" / "log" / "replaced", b"x", shared=True)
    assert modes(tmp_path) == {("directory", 0o777), ("file", 0o666)}


def test_an_output_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "output"
    with storage.open_output(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert storage.list_files(tmp_path) == ["output"]


def test_an_output_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "output"
    path.write_bytes(b"old")

    def fail() -> None:
        with storage.open_output(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"old"
    assert storage.list_files(tmp_path) == ["output"]


def test_a_file_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert storage.create(path, b"first")
    assert not storage.create(path, b"second")
    assert path.read_bytes() == b"first"
    assert storage.list_files(tmp_path) == ["file"]


def test_a_file_system_without_links_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(storage.LinksUnsupportedError):
        storage.create(tmp_path / "file", b"x")
    assert storage.list_files(tmp_path) == []


def test_put_writes_chunks_one_after_another(tmp_path: Path) -> None:
    storage.put(tmp_path / "file", (b"%d" % number for number in range(3)))
    assert (tmp_path / "file").read_bytes() == b"012"


def test_paths_of_a_missing_directory_are_an_empty_list(tmp_path: Path) -> None:
    assert (
        storage.list_paths(tmp_path / "missing") == storage.list_paths(tmp_path / "missing", "*.json") == []
    )
    (tmp_path / "b").touch()
    (tmp_path / ".a").mkdir()
    assert [path.name for path in storage.list_paths(tmp_path)] == [".a", "b"]
