"""Capture speed beside pg_recvlogical: `python -m benchmarks.capture`.

One server, one load, one stretch of WAL; every contender reads it from a slot of its own, over TCP on the loopback address, in turn,
several times. Only the ratios within one run say something: the machine is part of the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES, TRANSACTION_ROWS, Case
from benchmarks.contenders import CONTENDERS, REFERENCE, Measurement
from benchmarks.latency import CLIENTS, Latency, measure_latency
from benchmarks.source import BenchSource
from penstock import __version__

_RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("psycopg", "pyarrow", "numpy")
_LATENCY_RATE = 500
_LATENCY_SECONDS = 10.0

Rounds = Mapping[str, Sequence[Measurement]]


def main() -> None:
    arguments = _parse_arguments()
    console = Console()
    chosen = [case for case in CASES if case.name in arguments.case]
    results: dict[str, object] = {"machine": _machine(), "rows": arguments.rows, "transaction_rows": TRANSACTION_ROWS}
    with BenchSource() as source:
        results["versions"] = _versions(source)
        results["cases"] = {case.name: _run_case(console, source, case, arguments.rows, arguments.rounds) for case in chosen}
        if arguments.latency:
            results["latency"] = _run_latency(console, source)
    if arguments.save:
        path = _RESULTS / f"capture-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"saved as benchmarks/results/{path.name}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description="Capture speed beside pg_recvlogical.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="changes in the WAL (default 1000000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender reads them (default 3)")
    names = [case.name for case in CASES]
    parser.add_argument("--case", action="append", choices=names, help="what is changed (default inserts; may be given again)")
    parser.add_argument("--no-latency", dest="latency", action="store_false", help="measure the rate only")
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    arguments = parser.parse_args()
    arguments.case = arguments.case or names[:1]
    return arguments


# --- rates ------------------------------------------------------------------------------------------------------------------


def _run_case(console: Console, source: BenchSource, case: Case, rows: int, rounds: int) -> dict[str, object]:
    with console.status(f"{case.title}: loading {rows:,} rows"):
        source.prepare(case, rows)
        source.load(case, rows)
    wal_bytes = source.slot_backlog_bytes()
    load_before = os.getloadavg()[0]
    measured: dict[str, list[Measurement]] = {contender.name: [] for contender in CONTENDERS}
    for number in range(rounds):
        for contender in CONTENDERS:
            with console.status(f"{case.title}: round {number + 1} of {rounds}, {contender.name}"):
                measured[contender.name].append(contender.measure(source, rows))
    start_up = REFERENCE.measure_start_up(source)
    console.print(_rate_table(case, rows, wal_bytes, measured))
    for contender in CONTENDERS:
        console.print(f"  {contender.name}: timed from {contender.timed}")
    console.print(f"  pg_recvlogical with nothing to read takes {start_up.wall_seconds * 1000:.0f} ms; nothing is subtracted above")
    console.print(f"  load average of the machine: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores\n")
    return {
        "wal_bytes": wal_bytes,
        "reference_start_up": start_up.to_json(),
        "load_average": [load_before, os.getloadavg()[0]],
        "rounds": {name: [each.to_json() for each in each_round] for name, each_round in measured.items()},
        "ratio": {name: _ratio(measured, name) for name in measured},
    }


def _rate_table(case: Case, rows: int, wal_bytes: int, measured: Rounds) -> Table:
    rounds = len(measured[REFERENCE.name])
    table = Table(
        title=f"{case.title}: {rows:,} rows, {wal_bytes / 1e6:.0f} MB of WAL, median of {rounds}, min–max",
        title_justify="left",
        show_lines=True,
    )
    table.add_column("")
    for heading in ("k rows/s", "ratio", "wall s", "client CPU\ns / M rows", "server CPU\ns / M rows"):
        table.add_column(heading, justify="right", no_wrap=True)
    for contender in CONTENDERS:
        mine = measured[contender.name]
        table.add_row(
            contender.name,
            _spread(mine, lambda each: each.rows_per_second / 1000, "{:.0f}"),
            f"{_ratio(measured, contender.name):.2f}",
            _spread(mine, lambda each: each.wall_seconds, "{:.2f}"),
            _spread(mine, lambda each: each.client_cpu_seconds / rows * 1e6, "{:.2f}"),
            _spread(mine, lambda each: each.server_cpu_seconds / rows * 1e6, "{:.2f}"),
        )
    return table


def _spread(measured: Sequence[Measurement], figure: Callable[[Measurement], float], form: str) -> str:
    values = [figure(each) for each in measured]
    low, middle, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle}\n{low}–{high}"


def _ratio(measured: Rounds, name: str) -> float:
    """Of the median rates; the reference has 1."""
    return _median_rate(measured[name]) / _median_rate(measured[REFERENCE.name])


def _median_rate(measured: Sequence[Measurement]) -> float:
    return statistics.median(each.rows_per_second for each in measured)


# --- latency ------------------------------------------------------------------------------------------------------------------


def _run_latency(console: Console, source: BenchSource) -> dict[str, object]:
    measured: dict[str, Latency] = {}
    for name, client in CLIENTS.items():
        with console.status(f"latency: {name}"):
            measured[name] = measure_latency(source, client, rate=_LATENCY_RATE, seconds=_LATENCY_SECONDS)
    table = Table(title=f"from commit, at {_LATENCY_RATE} transactions/s of one row", title_justify="left")
    table.add_column("")
    for heading in ("p50 ms", "p99 ms", "max ms", "client CPU, of one core"):
        table.add_column(heading, justify="right")
    for name, each in measured.items():
        times = (f"{seconds * 1000:.1f}" for seconds in (each.p50_seconds, each.p99_seconds, each.max_seconds))
        table.add_row(name, *times, f"{each.cpu_share:.0%}")
    console.print(table)
    return {"rate": _LATENCY_RATE, "seconds": _LATENCY_SECONDS, **{name: each.to_json() for name, each in measured.items()}}


# --- the machine ----------------------------------------------------------------------------------------------------------------


def _machine() -> dict[str, object]:
    """Its shape; nothing that names it."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory_bytes / 1e9),
        "congestion_control": _congestion_control(),
    }


def _congestion_control() -> str | None:
    """It decides how the server's small packets are put together, and so the rate of a client that does not mind it."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _versions(source: BenchSource) -> dict[str, str]:
    packages = {name: version(name) for name in _PACKAGES}
    return {"postgres": source.version, "python": platform.python_version(), "penstock": __version__, **packages}


if __name__ == "__main__":
    main()
