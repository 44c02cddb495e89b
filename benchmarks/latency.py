"""How soon after its commit a change is there, while small transactions come at a steady rate."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, dataclass

import psycopg

from benchmarks.cases import CASES
from benchmarks.contenders import client_command
from benchmarks.source import BenchSource

CLIENTS = {"Penstock → Arrow": "arrow-latency", "Penstock → spool": "spool-latency"}


@dataclass(frozen=True, slots=True)
class Latency:
    """From the commit's own timestamp, on the same clock, to the decoded row or the sealed segment."""

    p50_seconds: float
    p99_seconds: float
    max_seconds: float
    cpu_share: float
    """Of one core, for the client."""

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def measure_latency(source: BenchSource, client: str, *, rate: int, seconds: float) -> Latency:
    rows = int(rate * seconds)
    source.prepare(CASES[0], 0)
    with source.slot(empty=True) as slot:
        command = client_command(client, source.dsn, slot, rows)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            _write(source.dsn, rate, rows)
            report = json.loads(process.stdout.read())
    return Latency(report["p50_seconds"], report["p99_seconds"], report["max_seconds"], report["cpu_seconds"] / report["wall_seconds"])


def _write(dsn: str, rate: int, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        start = time.monotonic()
        for row in range(1, rows + 1):
            time.sleep(max(0.0, start + row / rate - time.monotonic()))
            connection.execute(CASES[0].change, {"low": row, "high": row})
