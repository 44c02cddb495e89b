"""Snapshot speed beside COPY, DuckDB and Spark's JDBC reader: `python -m benchmarks.snapshot`.

One server, one unchanged table. Every contender copies the whole table over TCP on the loopback address, in
turn, several times, with two connections. The Spark contenders share one session: their first copies, before
everything is loaded and compiled, are reported separately and not compared. Only ratios within one run are
meaningful, because the figures depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.cases import CASES
from benchmarks.copies import (
    DELTA,
    JDBC,
    PARALLELISM,
    PARQUET,
    REFERENCE,
    Copier,
    Copy,
    DuckCopy,
    PsqlCopy,
    SparkSessionProcess,
    spark_copies,
)
from benchmarks.debezium import Unavailable
from benchmarks.duck import ensure_duckdb
from benchmarks.goals import Goal, Rounds
from benchmarks.results import machine, save, versions
from benchmarks.source import BenchSource
from benchmarks.tables import goal_table, rate_table, ratio

_ROWS = 2_000_000
_LEVEL = 0.95


def main() -> None:
    arguments = _parse_arguments()
    console = Console()
    start = time.monotonic()
    with ExitStack() as stack:
        source = stack.enter_context(BenchSource())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        with console.status(f"loading {arguments.rows:,} rows"):
            source.fill(CASES[0], arguments.rows)
        with console.status("starting Spark"):
            session = stack.enter_context(SparkSessionProcess(source, arguments.rows, directory))
        run = _Run(console, source, arguments.rows, directory)
        on_spark = spark_copies(session)
        first = {copier.name: run.copy(copier) for copier in on_spark}
        others: list[Copier] = [PsqlCopy(1), REFERENCE, *_duckdb(console)]
        load_before = os.getloadavg()[0]
        measured = run.rounds([*others, *on_spark], arguments.rounds)
        load = [load_before, os.getloadavg()[0]]
        results: dict[str, object] = {
            "machine": machine(),
            "versions": versions(source.version) | {"spark": session.version},
            "parallelism": PARALLELISM,
            "load_average": load,
            "rows": arguments.rows,
            "first": {name: each.to_json() for name, each in first.items()},
            "rounds": {
                name: [each.to_json() for each in each_round] for name, each_round in measured.items()
            },
            "ratio": {name: ratio(measured, name, REFERENCE.name) for name in measured},
        }
    run.show(measured, first, load)
    goals = list(snapshot_goals(measured))
    results["goals"] = [goal.to_json() for goal in goals]
    console.print(goal_table(goals))
    console.print(f"took {time.monotonic() - start:.0f} s")
    if arguments.save:
        console.print(f"saved as benchmarks/results/{save('snapshot', results).name}")


def snapshot_goals(measured: Rounds) -> Iterator[Goal]:
    """Goals of a snapshot; DuckDB may be missing."""
    names = [name for name in measured if name.startswith("DuckDB")]
    demands = [
        (PARQUET, REFERENCE.name, 0.5),
        (PARQUET, JDBC, 2.0),
        *((PARQUET, name, _LEVEL) for name in names),
        (DELTA, PARQUET, 0.6),
    ]
    for ours, theirs, least in demands:
        found = ratio(measured, ours, theirs)
        yield Goal(f"{ours} ≥ {least:g} × {theirs}", found, found >= least)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.snapshot", description="Snapshot speed beside COPY, DuckDB and JDBC."
    )
    parser.add_argument("--rows", type=int, default=_ROWS, help=f"rows in the table (default {_ROWS:,})")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each contender copies them (default 3)"
    )
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    return parser.parse_args()


def _duckdb(console: Console) -> list[Copier]:
    try:
        with console.status("preparing DuckDB"):
            ensure_duckdb()
    except Unavailable as missing:
        console.print(f"without DuckDB: {missing}", markup=False)
        return []
    return [DuckCopy()]


class _Run:
    def __init__(self, console: Console, source: BenchSource, rows: int, directory: Path) -> None:
        self._console = console
        self._source = source
        self._rows = rows
        self._directory = directory
        self._copies = 0
        self._timed: dict[str, str] = {}

    def copy(self, copier: Copier) -> Copy:
        self._copies += 1
        self._timed[copier.name] = copier.timed
        with self._console.status(copier.name):
            return copier.copy(self._source, self._rows, self._directory / f"copy-{self._copies}")

    def rounds(self, copiers: Sequence[Copier], rounds: int) -> dict[str, list[Copy]]:
        measured: dict[str, list[Copy]] = {copier.name: [] for copier in copiers}
        for _ in range(rounds):
            for copier in copiers:
                measured[copier.name].append(self.copy(copier))
        return measured

    def show(self, measured: dict[str, list[Copy]], first: dict[str, Copy], load: Sequence[float]) -> None:
        console = self._console
        rounds = len(next(iter(measured.values())))
        title = (
            f"a table of {self._rows:,} rows of 10 columns, {PARALLELISM} connections; median of "
            f"{rounds}, min–max; Spark is warm"
        )
        console.print(rate_table(title, measured, REFERENCE.name))
        for name, timed in self._timed.items():
            written = measured[name][-1].bytes
            console.print(
                f"  {name}: timed from {timed}" + (f"; {written / 1e6:.0f} MB written" if written else "")
            )
        for name, each in first.items():
            console.print(
                f"  {name}, the first in the session: {each.wall_seconds:.1f} s, "
                f"{each.rows_per_second / 1000:.0f} k rows/s"
            )
        console.print(
            f"  load average of the machine: {load[0]:.1f} before, {load[1]:.1f} after, on "
            f"{os.cpu_count()} cores\n"
        )


if __name__ == "__main__":
    main()
