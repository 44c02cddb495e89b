"""Latency from commit to change, for small transactions at a steady rate."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import psycopg

from benchmarks.cases import CASES
from benchmarks.contenders import ARROW, SPOOL, client_command
from benchmarks.debezium import Debezium
from benchmarks.source import BenchSource, change_call

CLIENTS = {ARROW.name: "arrow-latency", SPOOL.name: "spool-latency"}

_CASE = CASES[0]


@dataclass(frozen=True, slots=True)
class Latency:
    """From the commit's own timestamp, on the same clock, to the decoded row or the sealed segment."""

    p50_seconds: float
    p99_seconds: float
    max_seconds: float
    cpu_share: float
    """Fraction of one core, for the client."""

    @classmethod
    def of(cls, report: Mapping[str, float]) -> Latency:
        share = report["cpu_seconds"] / report["wall_seconds"]
        return cls(report["p50_seconds"], report["p99_seconds"], report["max_seconds"], share)

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def measure_latency(source: BenchSource, client: str, *, rate: int, seconds: float) -> Latency:
    rows = int(rate * seconds)
    source.prepare(_CASE, 0)
    with source.slot(empty=True) as slot:
        command = client_command(client, source.dsn, slot, rows)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            _write(source.dsn, rate, rows)
            return Latency.of(json.loads(process.stdout.read()))


def measure_debezium(source: BenchSource, debezium: Debezium, *, rate: int, seconds: float) -> Latency:
    rows = int(rate * seconds)
    source.prepare(_CASE, 0)
    with source.slot(empty=True) as slot:
        debezium.ask(source, slot, rows)
        source.wait_until_read(slot)
        _write(source.dsn, rate, rows)
        return Latency.of(debezium.answer())


def _write(dsn: str, rate: int, rows: int) -> None:
    statement = change_call(_CASE.change)
    with psycopg.connect(dsn, autocommit=True) as connection:
        start = time.monotonic()
        for row in range(1, rows + 1):
            time.sleep(max(0.0, start + row / rate - time.monotonic()))
            connection.execute(statement, [row, row])
