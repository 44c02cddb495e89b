"""Making several files durable at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.spool import storage

AT_THE_END = """
import atexit
import sys
from pathlib import Path
from penstock.spool import storage

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
