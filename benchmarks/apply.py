"""From the WAL through Spark into tables: `python -m benchmarks.apply`, or `make bench-apply`.

The first part applies a backlog, which each contender reads from a separate slot, as in `benchmarks.capture`.
pg_recvlogical and Debezium's engine discard it; pipelines write it to Delta and Iceberg mirrors. The second
part measures the latency from commit to table at a steady rate, for tables of different sizes. Only ratios
within one run are meaningful.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.apply_latency import STEADY, Steady, Visible, measure_steady, steady_goals, steady_table
from benchmarks.applying import SINKS, Mirror, SparkClient, spark_client
from benchmarks.cases import BACKLOGS, Case
from benchmarks.contenders import REFERENCE, Contender, Measurement
from benchmarks.debezium import Debezium, start_debezium
from benchmarks.goals import Goal, median_rate
from benchmarks.results import machine, save, versions
from benchmarks.source import BenchSource
from benchmarks.tables import goal_table, rate_table, ratio

_TABLE_ROWS = 1_000_000
_TIMED = "the call of run, on a session that is there, to the record of the epoch that holds the last change"


def main() -> None:
    arguments = _parse_arguments()
    console = Console()
    start = time.monotonic()
    results: dict[str, object] = {}
    goals: list[Goal] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        source = stack.enter_context(BenchSource())
        client = stack.enter_context(spark_client())
        debezium = start_debezium(console, stack) if arguments.debezium else None
        results |= {"machine": machine(), "versions": versions(source.version)}
        run = _Backlogs(console, source, client, directory, debezium)
        chosen = [case for case in BACKLOGS if case.name in arguments.only]
        results["backlogs"] = {case.name: run.measure(case, arguments.rounds) for case in chosen}
        goals += run.goals
        steady = [
            each
            for each in STEADY
            if each.name in arguments.only and each.table_rows <= arguments.max_table_rows
        ]
        found: dict[Steady, Visible] = {}
        for load in steady:
            with console.status(f"{load.title}: {arguments.seconds:.0f} s"):
                found[load] = measure_steady(source, client, directory, load, arguments.seconds)
    if found:
        console.print(steady_table(found))
        goals += steady_goals(found)
        results["steady"] = {case.name: each.to_json() for case, each in found.items()}
    results["goals"] = [goal.to_json() for goal in goals]
    console.print(goal_table(goals))
    console.print(
        f"took {time.monotonic() - start:.0f} s; load average of the machine {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores"
    )
    if arguments.save:
        console.print(f"saved as benchmarks/results/{save('apply', results).name}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.apply", description="From the WAL through Spark into tables."
    )
    names = [case.name for case in BACKLOGS] + [case.name for case in STEADY]
    parser.add_argument(
        "--only", action="append", choices=names, help="this alone (may be given again; default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each contender reads a backlog (default 3)"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="how long each steady load lasts (default 30)"
    )
    parser.add_argument(
        "--max-table-rows", type=int, default=10_000_000, help="leave out steady loads on larger tables"
    )
    parser.add_argument(
        "--no-debezium", dest="debezium", action="store_false", help="measure without Debezium"
    )
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    arguments = parser.parse_args()
    arguments.only = arguments.only or names
    return arguments


class _Backlogs:
    def __init__(
        self,
        console: Console,
        source: BenchSource,
        client: SparkClient,
        directory: Path,
        debezium: Debezium | None,
    ) -> None:
        self._console = console
        self._source = source
        self._client = client
        self._directory = directory
        self._others: Sequence[Contender] = (REFERENCE,) if debezium is None else (REFERENCE, debezium)
        self._pipelines = 0
        self.goals: list[Goal] = []

    def measure(self, case: Case, rounds: int) -> dict[str, object]:
        console, source = self._console, self._source
        with console.status(f"{case.title}: preparing"):
            source.prepare(case, _TABLE_ROWS)
            # One for each round, since a backlog is applied to a target once, and one for warming up the
            # session.
            mirrors = {sink: [self._copied(sink) for _ in range(rounds + 1)] for sink in SINKS}
            source.load(case, case.rows)
        wal_bytes = source.slot_backlog_bytes()
        measured: dict[str, list[Measurement]] = {each.name: [] for each in self._others}
        measured |= {_title(sink): [] for sink in SINKS}
        for sink in SINKS:
            with console.status(f"{case.title}: warming up, {sink}"):
                mirrors[sink].pop().drain(case.rows)
        load = os.getloadavg()[0]
        for number in range(rounds):
            for contender in self._others:
                with console.status(f"{case.title}: round {number + 1} of {rounds}, {contender.name}"):
                    measured[contender.name].append(contender.measure(source, case.rows))
            for sink in SINKS:
                with console.status(f"{case.title}: round {number + 1} of {rounds}, {sink}"):
                    measured[_title(sink)].append(mirrors[sink].pop().drain(case.rows))
        console.print(
            rate_table(
                f"{case.title}: {case.rows:,} changes, {wal_bytes / 1e6:.0f} MB of WAL, median of {rounds}",
                measured,
                REFERENCE.name,
            )
        )
        console.print(f"  mirrors: timed from {_TIMED}")
        console.print(
            f"  load average of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after, on "
            f"{os.cpu_count()} cores\n"
        )
        self.goals += _goals(case, measured)
        return {
            "changes": case.rows,
            "wal_bytes": wal_bytes,
            "load_average": [load, os.getloadavg()[0]],
            "rounds": {
                name: [each.to_json() for each in each_round] for name, each_round in measured.items()
            },
            "ratio": {name: ratio(measured, name, REFERENCE.name) for name in measured},
        }

    def _copied(self, sink: str) -> Mirror:
        self._pipelines += 1
        mirror = Mirror(self._client, self._source, sink, self._pipelines, self._directory)
        mirror.copy()
        return mirror


def _title(sink: str) -> str:
    return f"Penstock → {sink.capitalize()} mirror"


def _goals(case: Case, measured: Mapping[str, Sequence[Measurement]]) -> list[Goal]:
    """The goals apply to inserts; the same ratios of other workloads are only reported."""
    is_demand = case.name == "inserts"
    goals = []
    for sink in SINKS:
        for name, least in ((REFERENCE.name, 1.0), (Debezium.name, 8.0)):
            if name in measured:
                rate = median_rate(measured[_title(sink)]) / median_rate(measured[name])
                words = f"{case.name} into {sink}: rows/s beside {name}" + (
                    f" ≥ {least:g} ×" if is_demand else ""
                )
                goals.append(Goal(words, rate, rate >= least if is_demand else None))
    return goals


if __name__ == "__main__":
    main()
