"""Making several files durable at once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.spool import storage
from penstock.spool.lock import SpoolLock

AT_THE_END = """
import atexit
import sys
from collections.abc import Iterator
from pathlib import Path
from penstock.spool import storage
from penstock.spool.lock import SpoolLock

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
    """As when a program ends without having closed its stream: the capture has a last word to say."""
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
    return {("directory" if path.is_dir() else "file", stat.S_IMODE(path.stat().st_mode)) for path in root.rglob("*")}


@pytest.mark.usefixtures("open_umask")
def test_directories_and_files_are_for_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    root = tmp_path / "above" / "private"
    storage.make_directory(root)
    storage.make_directory(root / "a" / "b")
    storage.write_bytes(root / "written", b"x")
    storage.replace_bytes(root / "c" / "replaced", b"x")
    storage.create_bytes(root / "d" / "created", b"x")
    storage.ensure_file(root / "empty")
    with storage.create_file(root / "opened") as file:
        file.write(b"x")
    with SpoolLock(root):
        pass
    assert modes(root) == {("directory", 0o700), ("file", 0o600)}
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(root.parent.stat().st_mode) == 0o777, "it may lead to a lake as well"


@pytest.mark.usefixtures("open_umask")
def test_what_other_readers_need_is_left_to_the_umask(tmp_path: Path) -> None:
    storage.make_directory(tmp_path / "lake" / "table", shared=True)
    storage.write_bytes(tmp_path / "lake" / "written", b"x", shared=True)
    storage.replace_bytes(tmp_path / "lake" / "log" / "replaced", b"x", shared=True)
    assert modes(tmp_path) == {("directory", 0o777), ("file", 0o666)}
