"""The contenders. Each reads one slot over TCP, in a separate process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from benchmarks.cases import PUBLICATION
from benchmarks.source import BenchSource, ServerCpu


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run that reads all changes: rows, time, and CPU time of the client."""

    rows: int
    wall_seconds: float
    client_cpu_seconds: float
    server_cpu_seconds: float

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.wall_seconds

    def to_json(self) -> dict[str, float]:
        return asdict(self)


class Contender(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def timed(self) -> str:
        """Describes the measured interval, for readers of the results."""
        ...

    def measure(self, source: BenchSource, rows: int) -> Measurement: ...


class PgRecvlogical:
    """The reference, which discards everything."""

    name = "pg_recvlogical → /dev/null"
    timed = "the start of the process to its end"

    def measure(self, source: BenchSource, rows: int) -> Measurement:
        return self._run(source, rows, empty=False)

    def measure_start_up(self, source: BenchSource) -> Measurement:
        """The same on an empty slot: the time that is not spent on reading."""
        return self._run(source, 0, empty=True)

    def _run(self, source: BenchSource, rows: int, *, empty: bool) -> Measurement:
        with source.slot(empty=empty) as slot, ServerCpu(source.dsn, slot) as server:
            command = [
                *(
                    str(source.server.bin("pg_recvlogical")),
                    "--dbname",
                    source.dsn,
                    "--slot",
                    slot,
                    "--start",
                    "--no-loop",
                ),
                *("--endpos", source.wal_position(), "--file", "/dev/null"),
                *("--option", "proto_version=1", "--option", f"publication_names={PUBLICATION}"),
            ]
            cpu, wall = _children_cpu_seconds(), time.perf_counter()
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
            wall, cpu = time.perf_counter() - wall, _children_cpu_seconds() - cpu
        return Measurement(rows, wall, cpu, server.seconds)


@dataclass(frozen=True, slots=True)
class Penstock:
    """One of our own clients, which measures the time itself."""

    name: str
    client: str
    timed: str

    def measure(self, source: BenchSource, rows: int) -> Measurement:
        with source.slot() as slot, ServerCpu(source.dsn, slot) as server:
            done = subprocess.run(
                client_command(self.client, source.dsn, slot, rows), check=True, stdout=subprocess.PIPE
            )
        report = json.loads(done.stdout)
        if report["rows"] != rows:
            raise AssertionError(f"{self.name} gave {report['rows']} rows, not {rows}")
        return Measurement(rows, report["wall_seconds"], report["cpu_seconds"], server.seconds)


def client_command(client: str, dsn: str, slot: str, rows: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "benchmarks.clients",
        client,
        "--dsn",
        dsn,
        "--slot",
        slot,
        "--rows",
        str(rows),
    ]


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


REFERENCE = PgRecvlogical()
ARROW = Penstock("Penstock → Arrow", "to-arrow", "the start of the stream to the last decoded row")
SPOOL = Penstock("Penstock → spool", "to-spool", "the start of the stream to the last sealed row")
CONTENDERS: Sequence[Contender] = (REFERENCE, ARROW, SPOOL)
