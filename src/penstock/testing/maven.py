"""Fetches Maven artifacts for tests.

Ivy, which comes with Spark, resolves them by their coordinates as it resolves Spark's own packages, so nothing else has to be installed and
no address stands here.
"""

from __future__ import annotations

import hashlib
import subprocess
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
    <dependency org={organisation} name={module} rev={revision} transitive="false" conf="default->master">
      <artifact name={module} type={extension} ext={extension}{classifier}/>
    </dependency>
  </dependencies>
</ivy-module>
"""


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
    description = scratch / "ivy.xml"
    description.write_text(_description(wanted), encoding="utf-8")
    command = [str(find_java()), "-XX:TieredStopAtLevel=1", "-cp", str(_ivy()), "org.apache.ivy.Main", "-warn"]
    command += ["-cache", str(scratch / "ivy"), "-ivy", str(description), "-types", wanted.extension]
    command += ["-retrieve", str(scratch / "[artifact].[ext]")]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnfitError(f"{wanted} was not fetched within {_FETCH_SECONDS:.0f} s", hint=hint) from error
    file = scratch / f"{wanted.module}.{wanted.extension}"
    if done.returncode != 0 or not file.exists():
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip(" \t:.")]
        raise EnvironmentUnfitError(f"{wanted} could not be fetched: {' | '.join(said[-5:])}", hint=hint)
    return file


def check_released(file: Path, sha256: str, name: str) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise EnvironmentUnfitError(
            f"the artifact {name} is not the one that was released: its SHA-256 differs",
            hint="look into the package mirror that this machine uses, then try again",
        )


def _description(wanted: Coordinates) -> str:
    return _MODULE.format(
        organisation=quoteattr(wanted.organisation),
        module=quoteattr(wanted.module),
        revision=quoteattr(wanted.revision),
        extension=quoteattr(wanted.extension),
        classifier=f" m:classifier={quoteattr(wanted.classifier)}" if wanted.classifier else "",
    )


def _ivy() -> Path:
    spark = find_spec("pyspark")
    for folder in spark.submodule_search_locations or () if spark else ():
        for jar in Path(folder, "jars").glob("ivy-*.jar"):
            return jar
    raise EnvironmentUnfitError("pyspark's jars hold no Ivy to fetch artifacts with", hint="pip install 'pyspark>=4.1,<4.4'")
