from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import SpoolLockedError
from penstock.spool import SpoolLock
from penstock.spool.ownership import is_spool_locked

HOLD = """
import sys
from pathlib import Path
from penstock.spool import SpoolLock
with SpoolLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_cannot_write_one_spool_and_the_holder_is_named(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SpoolLockedError, match=f"process {other.pid} "):
            SpoolLock(tmp_path).acquire()
        other.kill()
        other.wait()
    with SpoolLock(tmp_path):
        pass


def test_one_process_cannot_take_it_twice(tmp_path: Path) -> None:
    with SpoolLock(tmp_path), pytest.raises(SpoolLockedError):
        SpoolLock(tmp_path).acquire()
    with SpoolLock(tmp_path):
        pass


def test_releasing_twice_is_harmless(tmp_path: Path) -> None:
    lock = SpoolLock(tmp_path)
    lock.acquire()
    lock.release()
    lock.release()
    with SpoolLock(tmp_path), pytest.raises(SpoolLockedError):
        SpoolLock(tmp_path).acquire()


def test_another_process_sees_whether_the_lock_is_held_also_after_a_crash(tmp_path: Path) -> None:
    assert not is_spool_locked(tmp_path / "none")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert is_spool_locked(tmp_path)
        other.kill()
        other.wait()
    assert not is_spool_locked(tmp_path)
    with SpoolLock(tmp_path):
        assert is_spool_locked(tmp_path)
    assert not is_spool_locked(tmp_path)
