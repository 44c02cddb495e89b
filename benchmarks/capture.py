"""Capture speed beside pg_recvlogical and Debezium: `python -m benchmarks.capture`.

One server, one load, one range of WAL. Every contender reads it from a separate slot, over TCP on the
loopback address, in turn, several times. Only ratios within one run are meaningful, because the figures
depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES, TRANSACTION_ROWS, Case
from benchmarks.contenders import CONTENDERS, REFERENCE, Contender, Measurement
from benchmarks.debezium import Debezium, Unavailable, WarmDebezium, start_debezium
from benchmarks.goals import Goal, latency_goals, rate_goals
from benchmarks.latency import CLIENTS, Latency, measure_debezium, measure_latency
from benchmarks.results import machine, save, versions
from benchmarks.source import BenchSource
from benchmarks.tables import goal_table, rate_table, ratio

_LATENCY_RATE = 500
_LATENCY_SECONDS = 10.0


def main() -> None:
    arguments = _parse_arguments()
    console = Console()
    start = time.monotonic()
    with ExitStack() as stack:
        source = stack.enter_context(BenchSource())
        debezium = start_debezium(console, stack) if arguments.debezium else None
        run = _Run(console, source, debezium)
        results: dict[str, object] = {
            "machine": machine(),
            "versions": versions(source.version),
            "transaction_rows": TRANSACTION_ROWS,
        }
        chosen = [case for case in CASES if case.name in arguments.only]
        results["cases"] = {
            case.name: run.case(case, arguments.rows or case.rows, arguments.rounds) for case in chosen
        }
        if arguments.latency:
            results["latency"] = run.latency()
    results["goals"] = [goal.to_json() for goal in run.goals]
    if run.goals:
        console.print(goal_table(run.goals))
    console.print(f"took {time.monotonic() - start:.0f} s")
    if arguments.save:
        console.print(f"saved as benchmarks/results/{save('capture', results).name}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capture", description="Capture speed beside pg_recvlogical and Debezium."
    )
    names = [case.name for case in CASES]
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        help="this workload alone (may be given again; default: all)",
    )
    parser.add_argument(
        "--rows", type=int, help="changes in the WAL (default: as many as take some seconds, by workload)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each contender reads them (default 3)"
    )
    parser.add_argument(
        "--no-debezium",
        dest="debezium",
        action="store_false",
        help="measure without Debezium, which takes most of the time",
    )
    parser.add_argument("--no-latency", dest="latency", action="store_false", help="measure the rate only")
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    arguments = parser.parse_args()
    arguments.only = arguments.only or names
    return arguments


class _Run:
    def __init__(self, console: Console, source: BenchSource, debezium: Debezium | None) -> None:
        self._console = console
        self._source = source
        self._debezium = debezium
        self._contenders: Sequence[Contender] = (
            CONTENDERS if debezium is None else (*CONTENDERS, debezium, WarmDebezium(debezium))
        )
        self.goals: list[Goal] = []

    def case(self, case: Case, rows: int, rounds: int) -> dict[str, object]:
        console, source = self._console, self._source
        with console.status(f"{case.title}: loading {rows:,} rows"):
            source.prepare(case, rows)
            source.load(case, rows)
        wal_bytes = source.slot_backlog_bytes()
        load_before = os.getloadavg()[0]
        measured: dict[str, list[Measurement]] = {contender.name: [] for contender in self._contenders}
        for number in range(rounds):
            for contender in self._contenders:
                with console.status(f"{case.title}: round {number + 1} of {rounds}, {contender.name}"):
                    self._measure(contender, rows, measured)
        start_up = REFERENCE.measure_start_up(source)
        title = f"{case.title}: {rows:,} rows, {wal_bytes / 1e6:.0f} MB of WAL, median of {rounds}, min–max"
        console.print(rate_table(title, measured, REFERENCE.name))
        for contender in self._contenders:
            console.print(f"  {contender.name}: timed from {contender.timed}")
        console.print(
            f"  pg_recvlogical with nothing to read takes {start_up.wall_seconds * 1000:.0f} ms; nothing "
            "is subtracted above"
        )
        console.print(
            f"  load average of the machine: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after, on "
            f"{os.cpu_count()} cores\n"
        )
        self.goals += rate_goals(case.name, measured)
        return {
            "rows": rows,
            "wal_bytes": wal_bytes,
            "reference_start_up": start_up.to_json(),
            "load_average": [load_before, os.getloadavg()[0]],
            "rounds": {
                name: [each.to_json() for each in each_round] for name, each_round in measured.items()
            },
            "ratio": {name: ratio(measured, name, REFERENCE.name) for name in measured},
        }

    def _measure(self, contender: Contender, rows: int, measured: dict[str, list[Measurement]]) -> None:
        if contender not in self._contenders:
            return
        try:
            measured[contender.name].append(contender.measure(self._source, rows))
        except Unavailable as missing:
            self._console.print(f"without Debezium from here on: {missing}", markup=False)
            self._debezium, self._contenders = None, CONTENDERS
            for name in measured.keys() - {each.name for each in CONTENDERS}:
                del measured[name]

    def latency(self) -> dict[str, object]:
        measured: dict[str, Latency] = {}
        for name, client in CLIENTS.items():
            with self._console.status(f"latency: {name}"):
                measured[name] = measure_latency(
                    self._source, client, rate=_LATENCY_RATE, seconds=_LATENCY_SECONDS
                )
        if self._debezium is not None:
            with self._console.status(f"latency: {self._debezium.name}"):
                found = measure_debezium(
                    self._source, self._debezium, rate=_LATENCY_RATE, seconds=_LATENCY_SECONDS
                )
                measured[self._debezium.name] = found
        self._console.print(_latency_table(measured))
        self.goals += latency_goals(measured)
        return {
            "rate": _LATENCY_RATE,
            "seconds": _LATENCY_SECONDS,
            **{name: each.to_json() for name, each in measured.items()},
        }


def _latency_table(measured: Mapping[str, Latency]) -> Table:
    table = Table(title=f"from commit, at {_LATENCY_RATE} transactions/s of one row", title_justify="left")
    table.add_column("")
    for heading in ("p50 ms", "p99 ms", "max ms", "client CPU, of one core"):
        table.add_column(heading, justify="right")
    for name, each in measured.items():
        times = (
            f"{seconds * 1000:.1f}" for seconds in (each.p50_seconds, each.p99_seconds, each.max_seconds)
        )
        table.add_row(name, *times, f"{each.cpu_share:.0%}")
    return table


if __name__ == "__main__":
    main()
