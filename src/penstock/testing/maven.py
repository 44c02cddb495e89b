"""Fetches Maven artifacts for tests.

Ivy, which comes with Spark, resolves them by their coordinates as it resolves Spark's own packages, so nothing else has to be installed and
no address stands here.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.sax.saxutils import quoteattr

from penstock.errors import EnvironmentUnfitError
from penstock.spark.java import find_java

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
    <dependency org={organisation} name={module} rev={revision} transitive="{transitive}" conf="default->master{others}">
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
    """The file, in `scratch`. Ivy's caches lie there too: its own would have to be shared with other processes."""
    _retrieve([wanted], scratch, "[artifact].[ext]", hint, transitive=False)
    file = scratch / f"{wanted.module}.{wanted.extension}"
    if not file.exists():
        raise EnvironmentUnfitError(f"{wanted} could not be fetched: it has no such file", hint=hint)
    return file


def fetch_program(wanted: Sequence[Coordinates], scratch: Path, hint: str) -> Path:
    """A directory in `scratch` with these jars, and all others that they need to run."""
    _retrieve(wanted, scratch, "jars/[artifact]-[revision](-[classifier]).[ext]", hint, transitive=True)
    return scratch / "jars"


def _retrieve(wanted: Sequence[Coordinates], scratch: Path, pattern: str, hint: str, *, transitive: bool) -> None:
    description, names = scratch / "ivy.xml", ", ".join(map(str, wanted))
    description.write_text(_description(wanted, transitive=transitive), encoding="utf-8")
    command = [str(find_java()), "-XX:TieredStopAtLevel=1", "-cp", str(_ivy()), "org.apache.ivy.Main", "-warn"]
    command += ["-cache", str(scratch / "ivy"), "-ivy", str(description), "-types", wanted[0].extension]
    command += [*(["bundle"] if transitive else []), "-retrieve", str(scratch / pattern)]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnfitError(f"{names} was not fetched within {_FETCH_SECONDS:.0f} s", hint=hint) from error
    if done.returncode != 0:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip(" \t:.")]
        raise EnvironmentUnfitError(f"{names} could not be fetched: {' | '.join(said[-5:])}", hint=hint)


def check_released(file: Path, sha256: str, name: str) -> None:
    """A directory's digest is that of the names of its files, each with its own."""
    if (_directory_digest(file) if file.is_dir() else _digest(file)) != sha256:
        raise EnvironmentUnfitError(
            f"the artifact {name} is not the one that was released: its SHA-256 differs",
            hint="look into the package mirror that this machine uses, then try again",
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
    raise EnvironmentUnfitError("pyspark's jars hold no Ivy to fetch artifacts with", hint="pip install 'pyspark>=4.1,<4.4'")
