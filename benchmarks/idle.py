"""CPU time of an idle capture: `python -m benchmarks.idle`.

A separate process captures a slot into a spool, once in an idle database, and once in a database where all
changes are in unpublished tables. It must use at most a fiftieth of a core; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES
from benchmarks.contenders import client_command
from benchmarks.goals import Goal, exit_code, idle_goal
from benchmarks.results import machine, save, versions
from benchmarks.source import BenchSource, ServerCpu
from benchmarks.tables import goal_table

_WRITES_PER_SECOND = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.idle", description="CPU of a capture that has nothing to do."
    )
    parser.add_argument("--seconds", type=int, default=30, help="how long to look, for each (default 30)")
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    arguments = parser.parse_args()
    console = Console()
    table = Table(title=f"over {arguments.seconds} s, of one core", title_justify="left")
    for heading in ("", "capture", "its server process"):
        table.add_column(heading, justify="right" if heading else "left")
    figures: dict[str, object] = {"machine": machine(), "seconds": arguments.seconds}
    goals: list[Goal] = []
    with BenchSource() as source:
        figures["versions"] = versions(source.version)
        for name, is_written_to in (("nothing happens", False), ("unpublished tables are written to", True)):
            with console.status(name):
                share, server_share = _measure(source, arguments.seconds, is_written_to=is_written_to)
            table.add_row(name, f"{share:.2%}", f"{server_share:.2%}")
            figures[name] = {"cpu_share": share, "server_cpu_share": server_share}
            goals.append(idle_goal(name, share))
    figures["goals"] = [goal.to_json() for goal in goals]
    console.print(table)
    console.print(goal_table(goals))
    if arguments.save:
        console.print(f"saved as benchmarks/results/{save('idle', figures).name}")
    sys.exit(exit_code(goals))


def _measure(source: BenchSource, seconds: int, *, is_written_to: bool) -> tuple[float, float]:
    source.prepare(CASES[0], 0)
    with (
        source.slot(empty=True) as slot,
        ServerCpu(source.dsn, slot) as server,
        subprocess.Popen(
            client_command("idle", source.dsn, slot, seconds), stdout=subprocess.PIPE
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        before = server.seconds
        with _writes(source.dsn) if is_written_to else _nothing():
            report = json.loads(process.stdout.read())
    wall_seconds = report["wall_seconds"]
    return report["cpu_seconds"] / wall_seconds, (server.seconds - before) / wall_seconds


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _writes(dsn: str) -> Iterator[None]:
    over = threading.Event()

    def write() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS public.unpublished (at timestamptz)")
            while not over.wait(1 / _WRITES_PER_SECOND):
                connection.execute("INSERT INTO public.unpublished VALUES (now())")

    thread = threading.Thread(target=write, name="bench-writes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
