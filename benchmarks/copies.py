"""The contenders that copy a table, and their measurement.

All use TCP and the same number of connections, in turn.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from psycopg import sql

from benchmarks.cases import SCHEMA
from benchmarks.contenders import Measurement
from benchmarks.cpu import TreeCpu
from benchmarks.duck import VERSION as DUCKDB_VERSION
from benchmarks.duck import duck_command
from benchmarks.source import BenchSource

TABLE = f"{SCHEMA}.orders"
PARALLELISM = 2
_BEYOND = 2**32 - 1
"""More blocks than any table has."""


@dataclass(frozen=True, slots=True)
class Copy(Measurement):
    """`bytes` is the size of the written files."""

    bytes: int = 0


class Copier(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def timed(self) -> str:
        """Describes the measured interval, for readers of the results."""
        ...

    def copy(self, source: BenchSource, rows: int, directory: Path) -> Copy: ...


@dataclass(frozen=True, slots=True)
class PsqlCopy:
    """The reference: `COPY` in text format, discarded by psql."""

    connections: int
    timed = "the start of psql to its end"

    @property
    def name(self) -> str:
        return f"COPY → /dev/null, {self.connections} connection{'s' if self.connections > 1 else ''}"

    def copy(self, source: BenchSource, rows: int, directory: Path) -> Copy:
        with TreeCpu(source.server.pid) as server:
            cpu, wall = _children_cpu_seconds(), time.perf_counter()
            commands = [
                [str(source.server.bin("psql")), source.dsn, "-qX", "-c", rf"\copy {part} to /dev/null"]
                for part in self._parts(source)
            ]
            clients = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
            failed = [client for client in clients if client.wait() != 0]
            wall, cpu = time.perf_counter() - wall, _children_cpu_seconds() - cpu
        if failed:
            raise AssertionError("psql could not read the table")
        return Copy(rows, wall, cpu, server.seconds)

    def _parts(self, source: BenchSource) -> list[str]:
        """The whole table, or equal ranges of its blocks."""
        if self.connections == 1:
            return [TABLE]
        step = source.blocks(TABLE) // self.connections
        bounds = [number * step for number in range(self.connections)]
        part = sql.SQL("(SELECT * FROM {} WHERE ctid >= {}::tid AND ctid < {}::tid)")
        table = sql.Identifier(*TABLE.split("."))
        return [
            part.format(table, sql.Literal(f"({low},0)"), sql.Literal(f"({high},0)")).as_string()
            for low, high in zip(bounds, [*bounds[1:], _BEYOND], strict=True)
        ]


class DuckCopy:
    name = f"DuckDB {DUCKDB_VERSION} scanner → Parquet"
    timed = (
        "the attachment of the database to the end of the statement, in a process that has just been started"
    )

    def copy(self, source: BenchSource, rows: int, directory: Path) -> Copy:
        with TreeCpu(source.server.pid) as server:
            command = duck_command(source.dsn, TABLE, directory, PARALLELISM)
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        return _copy(self.name, json.loads(done.stdout), rows, server.seconds, directory)


class SparkSessionProcess:
    """One session that all copies through Spark share during a `with` block."""

    def __init__(self, source: BenchSource, rows: int, directory: Path) -> None:
        options = {
            "--dsn": source.dsn,
            "--table": TABLE,
            "--rows": str(rows),
            "--parallelism": str(PARALLELISM),
            "--directory": str(directory),
        }
        self._command = [
            sys.executable,
            "-m",
            "benchmarks.spark_copies",
            *(word for option in options.items() for word in option),
        ]
        self._directory = directory

    def __enter__(self) -> Self:
        errors = (self._directory / "session.log").open("w", encoding="utf-8")
        with errors:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.version = str(self._answer()["spark"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def ask(self, way: str) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{way}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                "the Spark session ended: "
                f"{(self._directory / 'session.log').read_text(encoding='utf-8')[-2000:]}"
            )
        answer: dict[str, float] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class SparkCopy:
    """A copy by the shared session."""

    name: str
    way: str
    timed: str
    session: SparkSessionProcess

    def copy(self, source: BenchSource, rows: int, directory: Path) -> Copy:
        with TreeCpu(source.server.pid) as server:
            report = self.session.ask(f"{self.way} {directory}")
        return _copy(self.name, report, rows, server.seconds, directory)


JDBC = "Spark JDBC → Parquet"
PARQUET = "Penstock → Parquet"
DELTA = "Penstock → Delta"


def spark_copies(session: SparkSessionProcess) -> Sequence[SparkCopy]:
    return (
        SparkCopy(
            PARQUET,
            "parquet",
            "the export of the snapshot to the last file on disk, by the tasks of a pipeline's snapshot",
            session,
        ),
        SparkCopy(DELTA, "delta", "the plan of a pipeline's snapshot to its commit", session),
        SparkCopy(
            JDBC,
            "jdbc",
            f"the query, by {PARALLELISM} ranges of the key, to the commit of the files",
            session,
        ),
    )


REFERENCE = PsqlCopy(PARALLELISM)


def _copy(name: str, report: dict[str, float], rows: int, server_seconds: float, directory: Path) -> Copy:
    if report["rows"] != rows:
        raise AssertionError(f"{name} gave {report['rows']} rows, not {rows}")
    written = sum(path.stat().st_size for path in directory.rglob("*.parquet"))
    shutil.rmtree(directory)
    return Copy(rows, report["wall_seconds"], report["cpu_seconds"], server_seconds, written)


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
