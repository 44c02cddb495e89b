"""Spark runs on a machine without Java."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

RUNS_A_JOB = """
import os, shutil
assert shutil.which("java") is None and "JAVA_HOME" not in os.environ

from contextlib import suppress
from pathlib import Path
from penstock.secret import Secret
from penstock.spark.session import build_session
word = "".join(("hid", "den"))  # this text is itself an argument of a process
conf = {
    "spark.hadoop.odd": Secret(f"{word} odd"),
    "spark.hadoop.fs.secret.key": f"{word} key",
    "spark.hadoop.plain": "plain " + "words",
}
spark = build_session("no-java", master="local[1]", conf=conf)
lines = []
for path in Path("/proc").glob("[0-9]*/cmdline"):
    with suppress(OSError):
        lines.append(path.read_text(errors="replace"))
hadoop = spark.sparkContext._jsc.hadoopConfiguration()
expected = {"odd": f"{word} odd", "fs.secret.key": f"{word} key"}
print("held", [hadoop.get(name) == conf_value for name, conf_value in expected.items()])
print("arguments", any("plain " + "words" in line for line in lines), any(word in line for line in lines))
vendor = spark._jvm.System.getProperty("java.vendor.version")
print("rows", spark.range(10).rdd.map(lambda row: row.id).sum(), "java", vendor)
spark.stop()
"""

# Commands used by Spark's launch scripts. Nothing else is on the PATH, in particular no java.
PROGRAMS = ("bash", "sh", "dirname", "ps", "cat", "env", "uname")


@pytest.mark.spark
def test_a_job_runs_on_the_bundled_jre_when_no_java_is_found_and_secrets_are_no_arguments(
    tmp_path: Path,
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        found = shutil.which(name)
        if found:
            (programs / name).symlink_to(found)
    environment = {
        **{name: value for name, value in os.environ.items() if name not in {"JAVA_HOME", "PYSPARK_PYTHON"}},
        "PATH": str(programs),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUNS_A_JOB],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rows 45 java " in done.stdout
    assert "held [True, True]" in done.stdout
    assert "arguments True False" in done.stdout, "a setting is an argument of the JVM, and a secret is not"


@pytest.mark.spark
def test_python_workers_talk_over_sockets_that_only_this_user_reaches(spark: SparkSession) -> None:
    conf = spark.sparkContext.getConf()
    assert conf.get("spark.python.unix.domain.socket.enabled") == "true"
    directory = Path(conf.get("spark.python.unix.domain.socket.dir") or "")
    found = directory.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o700)
    assert spark.range(3).rdd.map(lambda row: row.id).sum() == 3
    assert any(path.is_socket() for path in directory.glob(".*.sock"))
