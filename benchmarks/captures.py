"""Comparison of the capture methods: `python -m benchmarks.captures`.

Each follows one table of many rows while single rows are updated at a steady rate. Latency is measured from
the commit until a Python program has the change. Load is the CPU time of all server processes, minus that of
the updates alone in the same round. The cost for writers is the duration of an update. Each method is
measured several times, in turn; the figures are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.cpu import TreeCpu
from benchmarks.results import machine, save, versions
from benchmarks.source import BenchSource
from penstock import (
    CaptureSettings,
    ChangeCapture,
    PollingCapture,
    PollingRules,
    PollingSettings,
    SourceAddress,
    TableName,
    TriggerCapture,
    TriggerSettings,
    Upsert,
    WalCapture,
)

_TABLE = TableName("public", "followed")
_CREATE = """
DROP TABLE IF EXISTS public.followed;
DROP SEQUENCE IF EXISTS public.versions;
CREATE TABLE public.followed (id bigint PRIMARY KEY, note text, sent double precision,
  version bigint NOT NULL);
INSERT INTO public.followed SELECT n, repeat('x', 100), 0, n FROM generate_series(1, {rows}) n;
CREATE INDEX ON public.followed (version);
CREATE SEQUENCE public.versions;
SELECT setval('public.versions', {rows});
"""
_UPDATE = (
    "UPDATE public.followed SET version = nextval('public.versions'), sent = extract(epoch "
    "FROM clock_timestamp()) WHERE id = %s"
)
_UPDATE_MANY = "UPDATE public.followed SET sent = extract(epoch FROM clock_timestamp()) WHERE id <= 20000"

_NONE = "none"
_PATIENCE_SECONDS = 60.0

Make = Callable[[str, Path], ChangeCapture]
Figures = dict[str, float]


def _wal(dsn: str, directory: Path) -> ChangeCapture:
    settings = CaptureSettings(SourceAddress.parse(dsn), "followed", "followed", directory / "spool")
    return WalCapture(settings).with_publication_management({_TABLE}, manage=True)


def _polling(cursor: str, *, deletes: bool) -> Make:
    def make(dsn: str, directory: Path) -> ChangeCapture:
        rules = PollingRules(1.0, cursor, deletes=deletes, resume=directory / "resume")
        return PollingCapture(
            PollingSettings(SourceAddress.parse(dsn), "followed", directory / "spool", (_TABLE,), rules)
        )

    return make


def _trigger(dsn: str, directory: Path) -> ChangeCapture:
    settings = TriggerSettings(SourceAddress.parse(dsn), "followed", directory / "spool")
    return TriggerCapture(settings).with_trigger_management({_TABLE}, manage=True)


CAPTURES: dict[str, Make] = {
    "wal": _wal,
    "polling by xmin": _polling("xmin", deletes=False),
    "polling by xmin, deletes too": _polling("xmin", deletes=True),
    "polling by a column": _polling("version", deletes=False),
    "polling by a column, deletes too": _polling("version", deletes=True),
    "trigger": _trigger,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.captures", description="Latency and load of the captures."
    )
    parser.add_argument("--rows", type=int, default=200_000, help="of the table (default 200,000)")
    parser.add_argument("--rate", type=int, default=50, help="updates a second (default 50)")
    parser.add_argument(
        "--seconds", type=int, default=20, help="for each capture, in each round (default 20)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default 3)")
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    arguments = parser.parse_args()
    console, load = Console(), os.getloadavg()[0]
    settings = {name: getattr(arguments, name) for name in ("rows", "rate", "seconds", "rounds")}
    with BenchSource() as source:
        figures = {"machine": machine(), **settings, "versions": versions(source.version)}
        rounds = [_round(source, arguments, number, console) for number in range(arguments.rounds)]
    medians = {name: _medians([each[name] for each in rounds]) for name in (_NONE, *CAPTURES)}
    figures |= medians | {"each_round": rounds, "load_average": [load, os.getloadavg()[0]]}
    console.print(_table(medians, arguments))
    if arguments.save:
        console.print(f"saved as benchmarks/results/{save('captures', figures).name}")


def _round(
    source: BenchSource, arguments: argparse.Namespace, number: int, console: Console
) -> dict[str, Figures]:
    """Each method once per round, in alternating order, so that none always has the better place."""
    measured = {}
    for name in in_turn([_NONE, *CAPTURES], number):
        with console.status(f"round {number + 1} of {arguments.rounds}, {name}"):
            _prepare(source.dsn, arguments.rows)
            measured[name] = _measure(source, CAPTURES.get(name), arguments.rate, arguments.seconds)
            _clear(source.dsn)
    alone = measured[_NONE].cpu
    return {name: each.figures(alone, arguments.seconds) for name, each in measured.items()}


def in_turn(names: list[str], number: int) -> list[str]:
    return names[::-1] if number % 2 else names


def _medians(rounds: list[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _table(medians: dict[str, Figures], arguments: argparse.Namespace) -> Table:
    title = (
        f"{arguments.rows:,} rows, {arguments.rate} updates a second, polling once a second; medians "
        f"of {arguments.rounds}"
    )
    table = Table(
        "capture",
        "latency p50",
        "p99",
        "load on the server",
        "an update",
        "20,000 in one",
        title=title,
        title_justify="left",
    )
    for name, each in medians.items():
        own = [""] * 3
        if name != _NONE:
            own = [
                f"{each['p50_seconds'] * 1000:,.0f} ms",
                f"{each['p99_seconds'] * 1000:,.0f} ms",
                f"{each['server_cpu_share']:.1%} of a core",
            ]
        table.add_row(
            name, *own, f"{each['update_p50_seconds'] * 1000:.2f} ms", f"{each['bulk_seconds']:.2f} s"
        )
    return table


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds: latency of each change, duration of each update and of one statement for many rows, CPU time
    of the server.
    """

    latencies: list[float]
    updates: list[float]
    bulk: float
    cpu: float

    def figures(self, alone: float, seconds: int) -> Figures:
        """`alone` is the server's CPU time without a capture."""
        costs = {"update_p50_seconds": statistics.median(self.updates), "bulk_seconds": self.bulk}
        if not self.latencies:
            return costs
        p50, p99 = (statistics.quantiles(self.latencies, n=100)[at] for at in (49, 98))
        return {
            "p50_seconds": p50,
            "p99_seconds": p99,
            "server_cpu_share": max(0.0, self.cpu - alone) / seconds,
            **costs,
        }


def _measure(source: BenchSource, make: Make | None, rate: int, seconds: int) -> Measured:
    if make is None:
        with TreeCpu(source.server.pid) as server, _updates(source.dsn, rate) as took:
            time.sleep(seconds)
        return Measured([], took, _update_many(source.dsn), server.seconds)
    latencies: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory,
        closing(make(source.dsn, Path(directory)).live()) as stream,
    ):
        with TreeCpu(source.server.pid) as server, _updates(source.dsn, rate) as took:
            deadline = time.monotonic() + seconds
            for change in stream:
                if isinstance(change.event, Upsert):
                    sent = change.event.row["sent"]
                    assert isinstance(sent, float)
                    latencies.append(time.time() - sent)
                change.ack.confirm()
                if time.monotonic() >= deadline:
                    break
        bulk = _update_many(source.dsn)
    return Measured(latencies, took, bulk, server.seconds)


def _prepare(dsn: str, rows: int) -> None:
    """A new table for each method: autovacuum is off, so a later method would read the dead rows of earlier
    ones.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_CREATE.format(rows=rows).encode())
        connection.execute("VACUUM ANALYZE public.followed")
        connection.execute("CHECKPOINT")


def _clear(dsn: str) -> None:
    """A remaining slot or trigger would slow down the next method."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute("SELECT 1 FROM pg_replication_slots WHERE active").fetchone():
            assert time.monotonic() < deadline, "the slot is still being read"
            time.sleep(0.05)
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        connection.execute("DROP PUBLICATION IF EXISTS followed")
        connection.execute("DROP SCHEMA IF EXISTS followed CASCADE")


def _update_many(dsn: str) -> float:
    with psycopg.connect(dsn, autocommit=True) as connection:
        begin = time.monotonic()
        connection.execute(_UPDATE_MANY)
        return time.monotonic() - begin


@contextmanager
def _updates(dsn: str, rate: int) -> Iterator[list[float]]:
    """Returns the durations so far, in seconds."""
    over, took = Event(), list[float]()

    def update() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            number = 0
            while not over.wait(1 / rate):
                number += 1
                begin = time.monotonic()
                connection.execute(_UPDATE, [1 + number % 10_000])
                took.append(time.monotonic() - begin)

    thread = Thread(target=update, name="bench-updates", daemon=True)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
