"""Download test dependencies: Maven artifacts, and Postgres binaries that the `embedded` extra does not
contain.

Ivy, which Spark ships, resolves the artifacts by their coordinates, as it does for Spark's packages. So no
other tool and no repository address is needed. The Postgres artifacts are jars with an archive of `initdb`,
`postgres` and its libraries.

An artifact is downloaded once per user, checked against its digest, unpacked next to its place in the cache,
and then renamed to that place. A directory in the cache is therefore complete, even if several processes
download at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.sax.saxutils import quoteattr

from penstock.errors import EnvironmentUnfitError
from penstock.spark.java import find_java, user_cache_dir

_FETCH_SECONDS = 600.0

_MODULE = """\
<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="penstock" module="fetched"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
{dependencies}
  </dependencies>
</ivy-module>
"""
_DEPENDENCY = """\
    <dependency org={organisation} name={module} rev={revision} transitive="{transitive}"
        conf="default->master{others}">
{artifacts}
    </dependency>"""
_ARTIFACT = """\
      <artifact name={module} type={extension} ext={extension}{classifier}/>"""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """One file of one version of a module."""

    organisation: str
    module: str
    revision: str
    extension: str = "jar"
    classifier: str = ""

    def __str__(self) -> str:
        further = f":{self.extension}:{self.classifier}" if self.classifier else ""
        return f"{self.organisation}:{self.module}:{self.revision}{further}"


def fetch(wanted: Coordinates, scratch: Path, hint: str) -> Path:
    """Download one file into `scratch`. Ivy's caches are in `scratch` too, so that this process does not
    share them with others.
    """
    _retrieve([wanted], scratch, "[artifact].[ext]", hint, transitive=False)
    file = scratch / f"{wanted.module}.{wanted.extension}"
    if not file.exists():
        raise EnvironmentUnfitError(
            f"{wanted} could not be fetched: the artifact has no such file", hint=hint
        )
    return file


def fetch_program(wanted: Sequence[Coordinates], scratch: Path, hint: str) -> Path:
    """Download these jars and their dependencies, and return the directory in `scratch` that has them."""
    _retrieve(wanted, scratch, "jars/[artifact]-[revision](-[classifier]).[ext]", hint, transitive=True)
    return scratch / "jars"


def _retrieve(
    wanted: Sequence[Coordinates], scratch: Path, pattern: str, hint: str, *, transitive: bool
) -> None:
    description, names = scratch / "ivy.xml", ", ".join(map(str, wanted))
    description.write_text(_description(wanted, transitive=transitive), encoding="utf-8")
    command = [
        str(find_java()),
        "-XX:TieredStopAtLevel=1",
        "-cp",
        str(_ivy()),
        "org.apache.ivy.Main",
        "-warn",
    ]
    command += ["-cache", str(scratch / "ivy"), "-ivy", str(description), "-types", wanted[0].extension]
    command += [*(["bundle"] if transitive else []), "-retrieve", str(scratch / pattern)]
    try:
        done = subprocess.run(
            command, cwd=scratch, capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnfitError(
            f"{names} was not fetched within {_FETCH_SECONDS:.0f} s", hint=hint
        ) from error
    if done.returncode != 0:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip(" \t:.")]
        raise EnvironmentUnfitError(f"{names} could not be fetched: {' | '.join(said[-5:])}", hint=hint)


def check_released(file: Path, sha256: str, name: str) -> None:
    """Raise unless the digest matches. The digest of a directory is computed over the names and digests of
    its files.
    """
    if (_directory_digest(file) if file.is_dir() else _digest(file)) != sha256:
        raise EnvironmentUnfitError(
            f"the artifact {name} differs from the released one (SHA-256 mismatch)",
            hint="check the package mirror that this machine uses, then try again",
        )


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _directory_digest(directory: Path) -> str:
    lines = [f"{file.name} {_digest(file)}\n" for file in sorted(directory.iterdir())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _description(wanted: Sequence[Coordinates], *, transitive: bool) -> str:
    modules: dict[tuple[str, str, str], list[Coordinates]] = {}
    for each in wanted:
        modules.setdefault((each.organisation, each.module, each.revision), []).append(each)
    dependencies = [
        _DEPENDENCY.format(
            organisation=quoteattr(organisation),
            module=quoteattr(module),
            revision=quoteattr(revision),
            transitive=str(transitive).lower(),
            others=",runtime" if transitive else "",
            artifacts="\n".join(map(_artifact, files)),
        )
        for (organisation, module, revision), files in modules.items()
    ]
    return _MODULE.format(dependencies="\n".join(dependencies))


def _artifact(wanted: Coordinates) -> str:
    return _ARTIFACT.format(
        module=quoteattr(wanted.module),
        extension=quoteattr(wanted.extension),
        classifier=f" m:classifier={quoteattr(wanted.classifier)}" if wanted.classifier else "",
    )


def _ivy() -> Path:
    spark = find_spec("pyspark")
    for folder in spark.submodule_search_locations or () if spark else ():
        for jar in Path(folder, "jars").glob("ivy-*.jar"):
            return jar
    raise EnvironmentUnfitError(
        "pyspark's jars contain no Ivy, which downloads artifacts", hint="pip install 'pyspark>=4.1,<4.4'"
    )


_ORGANISATION = "io.zonky.test.postgres"
_BINARIES_MODULE = "embedded-postgres-binaries-linux-{architecture}"
_ARCHITECTURES: Mapping[str, str] = {
    "x86_64": "amd64",
    "amd64": "amd64",
    "aarch64": "arm64v8",
    "arm64": "arm64v8",
}
_OTHER_SERVER = "or run the tests against another server: PENSTOCK_TEST_PG=<DSN>"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A Postgres version for one architecture: Maven coordinates and the digest of the jar."""

    architecture: str
    revision: str
    sha256: str

    @property
    def module(self) -> str:
        return _BINARIES_MODULE.format(architecture=self.architecture)

    @property
    def major(self) -> int:
        return int(self.revision.partition(".")[0])

    def __str__(self) -> str:
        return f"{_ORGANISATION}:{self.module}:{self.revision}"


_ARTIFACTS = (
    Artifact("amd64", "17.6.0", "23da5a044b4fb7a5a081a45008c95749c873305328d73f86aefd56922ce1d29d"),
    Artifact("amd64", "15.15.0", "7c73da91870b0615b37a8ceb84871bd42f28c3600f87a97ca9747f4a0b8d2dbb"),
    Artifact("amd64", "14.23.0", "d041b87dd72016f2baf93bca54e91d3c85c2b8132bbf86ad82056d6b24b353ce"),
    # Older than the oldest supported version, to test that Penstock rejects it.
    Artifact("amd64", "13.22.0", "df102cd31047d65cd10a3394240cda388e2b9804074d707937ac5b7c5d5d8de5"),
    Artifact("arm64v8", "17.6.0", "84427ea54a5238247924ef3b0f940e7d027e58760f19d7325242e50d22fa014a"),
    Artifact("arm64v8", "15.15.0", "623ee4c35cfdccd585d4473ff9b51942d465a7f8280687e6b960f56066f58909"),
    Artifact("arm64v8", "14.23.0", "a55b93f67051a602be033b298461709f88789dccee925236f2fb5a4eaf9dd526"),
)

VERSIONS: tuple[int, ...] = tuple(sorted({artifact.major for artifact in _ARTIFACTS}, reverse=True))


def ensure_binaries(version: int) -> Path:
    """Directory of the programs of this version, downloaded if necessary."""
    artifact = _artifact_binaries(version, platform.system(), platform.machine())
    home = user_cache_dir() / "postgres" / artifact.revision
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{artifact.revision}-", dir=home.parent) as scratch:
            hint = f"allow Spark to download packages on this machine, {_OTHER_SERVER}"
            jar = fetch(Coordinates(_ORGANISATION, artifact.module, artifact.revision), Path(scratch), hint)
            install(jar, artifact, home)
    return home / "bin"


def install(jar: Path, artifact: Artifact, home: Path) -> None:
    """Unpack the archive in `jar` as `home`, atomically. If another process has created `home` first, this
    keeps that directory.
    """
    check_released(jar, artifact.sha256, str(artifact))
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


def _artifact_binaries(version: int, system: str, machine: str) -> Artifact:
    architecture = _ARCHITECTURES.get(machine.lower()) if system == "Linux" else None
    for artifact in _ARTIFACTS:
        if (artifact.major, artifact.architecture) == (version, architecture):
            return artifact
    raise EnvironmentUnfitError(
        f"no Postgres {version} binaries for {system} on {machine}",
        hint=f"use Linux on x86_64, {_OTHER_SERVER}",
    )


def _open_to_all(root: Path) -> None:
    """Make the files readable for every user: the server may run as another user, and the umask may be
    strict.
    """
    for folder, _, names in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))
