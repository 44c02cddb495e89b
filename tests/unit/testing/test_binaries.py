from __future__ import annotations

import hashlib
import io
import os
import platform
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from penstock.errors import EnvironmentUnfitError
from penstock.testing import downloads as binaries
from penstock.testing import downloads as maven
from penstock.testing.downloads import Artifact, install


def packed(folder: Path, architecture: str = "amd64") -> tuple[Path, Artifact]:
    """A jar as they are published, with a `postgres` that prints a line."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as files:
        for name, mode, text in (
            ("bin/postgres", 0o755, "#!/bin/sh\necho it runs\n"),
            ("share/postgresql/sample", 0o644, "text"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), mode
            files.addfile(entry, io.BytesIO(text.encode()))
    jar = folder / "binaries.jar"
    with zipfile.ZipFile(jar, "w") as whole:
        whole.writestr("META-INF/MANIFEST.MF", "")
        whole.writestr("postgres-linux-x86_64.txz", archive.getvalue())
    return jar, Artifact(architecture, "14.99.0", hashlib.sha256(jar.read_bytes()).hexdigest())


def test_programs_are_executable_by_all_under_any_umask(tmp_path: Path) -> None:
    jar, artifact = packed(tmp_path)
    home = tmp_path / "home"
    before = os.umask(0o077)
    try:
        install(jar, artifact, home)
    finally:
        os.umask(before)
    assert (
        subprocess.run([home / "bin" / "postgres"], capture_output=True, text=True, check=True).stdout
        == "it runs\n"
    )
    modes = {str(path.relative_to(home)): path.stat().st_mode & 0o777 for path in (home, *home.rglob("*"))}
    assert {name for name, mode in modes.items() if mode & 0o055 != 0o055} == {"share/postgresql/sample"}
    assert modes["share/postgresql/sample"] & 0o444 == 0o444


def test_only_the_released_artifact_is_unpacked(tmp_path: Path) -> None:
    jar, artifact = packed(tmp_path)
    jar.write_bytes(jar.read_bytes() + b"\0")
    with pytest.raises(EnvironmentUnfitError, match=r"14\.99\.0 differs from the released one"):
        install(jar, artifact, tmp_path / "home")
    assert list(tmp_path.iterdir()) == [jar]


def test_second_fetch_keeps_the_existing_program_and_leaves_no_files_behind(tmp_path: Path) -> None:
    jar, artifact = packed(tmp_path)
    home = tmp_path / "home"
    install(jar, artifact, home)
    (home / "in use").touch()
    install(jar, artifact, home)
    assert (home / "in use").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"binaries.jar", "home"}


@pytest.mark.parametrize(("system", "machine"), [("Linux", "riscv64"), ("Darwin", "arm64")])
def test_a_platform_without_binaries_is_named_with_the_fix(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(
        EnvironmentUnfitError, match=f"no Postgres 14 binaries for {system} on {machine}"
    ) as caught:
        binaries.ensure_binaries(14)
    assert "PENSTOCK_TEST_PG" in (caught.value.hint or "")


def test_a_failed_fetch_names_the_request_and_the_reply(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        '#!/bin/sh\necho \'openjdk version "21"\' >&2\n[ "$1" = -version ] || { echo out of reach; exit 1; '
        "}\n",
        encoding="utf-8",
    )
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(java.parent.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(EnvironmentUnfitError, match=r":14\.[\d.]+ could not be fetched: .*out of reach"):
        binaries.ensure_binaries(14)
    assert list((tmp_path / "cache" / "penstock" / "postgres").iterdir()) == []


def test_a_spark_without_ivy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(maven, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentUnfitError, match="no Ivy"):
        binaries.ensure_binaries(14)
