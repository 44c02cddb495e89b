"""Directories of generated programs, which several processes install."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.storage.temporary import install_directory

FILES = {"bin/java": b"#!/bin/sh\n", "trusted.jks": b"certificates"}
MODES = dict.fromkeys((".", "bin", "bin/java"), 0o755)


def test_a_directory_is_installed_with_its_modes(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "java-1"
    install_directory(target, FILES, modes=MODES)
    assert {name: (target / name).read_bytes() for name in FILES} == FILES
    assert [(target / name).stat().st_mode & 0o777 for name in MODES] == [0o755] * 3
    assert [path.name for path in target.parent.iterdir()] == ["java-1"]


def test_a_directory_that_another_process_installed_stays(tmp_path: Path) -> None:
    target = tmp_path / "java-1"
    install_directory(target, FILES, modes=MODES)
    before = target.stat().st_ino
    install_directory(target, FILES, modes=MODES)
    assert target.stat().st_ino == before
    assert [path.name for path in tmp_path.glob("java*")] == ["java-1"]


@pytest.mark.parametrize("lost", FILES)
def test_a_directory_that_lacks_a_file_is_replaced(tmp_path: Path, lost: str) -> None:
    """Cleaners of temporary directories delete old files, and may leave the directories."""
    target = tmp_path / "java-1"
    install_directory(target, FILES, modes=MODES)
    (target / lost).unlink()
    install_directory(target, FILES, modes=MODES)
    assert (target / lost).read_bytes() == FILES[lost]
    assert [path.name for path in tmp_path.glob("java*")] == ["java-1"]
