"""Latency from commit to table for small transactions at a steady rate, and the duration of an epoch."""

from __future__ import annotations

import statistics
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psycopg
from rich.table import Table

from benchmarks.applying import Mirror, SparkClient
from benchmarks.cases import Case
from benchmarks.goals import Goal
from benchmarks.source import BenchSource

RATE = 1000
_TRIGGER = "100 ms"
_SETTLING_SECONDS = 10.0
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Steady:
    """One load: transactions that insert or update one row each, in a table with `table_rows` rows at the
    start.
    """

    name: str
    title: str
    sink: str
    mode: str
    updates: bool
    table_rows: int
    most_seconds: float | None
    """Limit of the median."""


STEADY: Sequence[Steady] = (
    Steady("insert-delta", "inserts into a Delta mirror", "delta", "mirror", False, 0, 0.3),
    Steady("append-delta", "updates into an append log, Delta", "delta", "append", True, 1_000_000, 0.3),
    Steady(
        "append-iceberg", "updates into an append log, Iceberg", "iceberg", "append", True, 1_000_000, 0.3
    ),
    Steady("insert-iceberg", "inserts into an Iceberg mirror", "iceberg", "mirror", False, 0, 0.3),
    Steady(
        "update-iceberg-1m",
        "updates into an Iceberg mirror of 1 M rows",
        "iceberg",
        "mirror",
        True,
        1_000_000,
        1.0,
    ),
    Steady(
        "update-delta-1m", "updates into a Delta mirror of 1 M rows", "delta", "mirror", True, 1_000_000, 4.0
    ),
    Steady(
        "update-iceberg-10m",
        "updates into an Iceberg mirror of 10 M rows",
        "iceberg",
        "mirror",
        True,
        10_000_000,
        1.0,
    ),
    Steady(
        "update-delta-10m",
        "updates into a Delta mirror of 10 M rows",
        "delta",
        "mirror",
        True,
        10_000_000,
        4.0,
    ),
)


@dataclass(frozen=True, slots=True)
class Visible:
    """From a commit to the epoch that holds it, on the same clock; and the epochs of that time."""

    p50_seconds: float
    p95_seconds: float
    p99_seconds: float
    transactions_per_second: float
    epochs: int
    epoch_seconds: float
    """Duration of the median epoch, without the wait before it."""
    epoch_rows: float
    cpu_share: float
    """Fraction of one core: driver, JVM, workers and capture together."""

    def to_json(self) -> dict[str, float]:
        return asdict(self)


class _Looks(threading.Thread):
    """Samples the WAL position and the time, to map positions to times."""

    def __init__(self, dsn: str) -> None:
        super().__init__(name="looks", daemon=True)
        self._dsn = dsn
        self._ending = threading.Event()
        self.found: list[tuple[float, int]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self.join()

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._ending.wait(_LOOK_SECONDS):
                at = time.time()
                row = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
                assert row is not None
                self.found.append((at, row[0]))


def measure_steady(
    source: BenchSource, client: SparkClient, directory: Path, case: Steady, seconds: float
) -> Visible:
    table = Case("accounts", "", 0, "accounts", "open_accounts", seed="open_accounts")
    source.prepare(table, case.table_rows)
    options: dict[str, object] = {"mode": case.mode, "trigger": _TRIGGER}
    mirror = Mirror(client, source, case.sink, 1000 + STEADY.index(case), directory, **options)
    mirror.copy()
    with mirror.following() as report:
        _write(source.dsn, case, 0, _SETTLING_SECONDS)
        with _Looks(source.dsn) as looks:
            begun = time.time()
            rate = _write(source.dsn, case, int(RATE * _SETTLING_SECONDS), seconds)
        time.sleep(max(2.0, 2 * (case.most_seconds or 0)))
    return _visible(looks.found, report, begun, rate)


def _visible(
    looks: Sequence[tuple[float, int]], report: Mapping[str, Any], begun: float, rate: float
) -> Visible:
    epochs = sorted(report["epochs"], key=lambda epoch: epoch["position"])
    positions = [epoch["position"] for epoch in epochs]
    waits = [
        epochs[found]["at"] - at
        for at, place in looks
        if (found := bisect_left(positions, place)) < len(epochs)
    ]
    if len(waits) < 0.9 * len(looks):
        raise RuntimeError("the pipeline fell behind and did not catch up")
    p50, p95, p99 = np.percentile(waits, [50, 95, 99]).tolist()
    steady = [epoch for epoch in epochs if begun < epoch["at"] and epoch["rows"]]
    took, rows = (statistics.median(epoch[name] for epoch in steady) for name in ("seconds", "rows"))
    return Visible(p50, p95, p99, rate, len(steady), took, rows, report["cpu_share"])


def _write(dsn: str, case: Steady, first: int, seconds: float) -> float:
    """Run the load in the server, so that the client takes no CPU time from the contenders. Returns the
    actual rate.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        call = "CALL bench.write_steadily(%s, %s, %s, %s, NULL)"
        row = connection.execute(
            call, [first, case.table_rows if case.updates else 0, RATE, seconds]
        ).fetchone()
        assert row is not None
        return float(row[0]) / seconds


def steady_table(found: Mapping[Steady, Visible]) -> Table:
    table = Table(
        title=f"from commit to the table, at {RATE} transactions/s of one row, an epoch every {_TRIGGER} "
        "at most",
        title_justify="left",
    )
    table.add_column("")
    for heading in ("p50 s", "p95 s", "p99 s", "tx/s", "epochs", "epoch s", "its rows", "CPU, of one core"):
        table.add_column(heading, justify="right")
    for case, each in found.items():
        times = (f"{value:.2f}" for value in (each.p50_seconds, each.p95_seconds, each.p99_seconds))
        rest = (
            f"{each.transactions_per_second:.0f}",
            f"{each.epochs}",
            f"{each.epoch_seconds:.2f}",
            f"{each.epoch_rows:.0f}",
        )
        table.add_row(case.title, *times, *rest, f"{each.cpu_share:.0%}")
    return table


def steady_goals(found: Mapping[Steady, Visible]) -> Iterator[Goal]:
    for case, each in found.items():
        most = case.most_seconds
        words = f"{case.title}: p50" + (f" ≤ {most:g} s" if most is not None else "")
        yield Goal(words, each.p50_seconds, None if most is None else each.p50_seconds <= most)
    by_name = {case.name: each for case, each in found.items()}
    for sink in ("iceberg", "delta"):
        small, large = by_name.get(f"update-{sink}-1m"), by_name.get(f"update-{sink}-10m")
        if small is not None and large is not None:
            growth = large.epoch_seconds / small.epoch_seconds
            flat = None if sink == "delta" else growth <= 1.25
            yield Goal(f"epoch of a 10 M-row {sink} mirror beside one of 1 M rows", growth, flat)
