"""Memory of a running pipeline over many epochs of many tables. `make bench-memory`.

Every epoch changes every table. From time to time the JVM's heap is measured after a full collection, and the resident memory of this
process and of the Python processes below it. The slope is that of a line through the samples of the second half, when everything has been
used once: at most 1 KB an epoch and table is the goal; else the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from pyspark.sql import SparkSession
from rich.console import Console

from benchmarks.goals import Goal, exit_code
from benchmarks.results import machine, save, versions
from benchmarks.running import SINKS, RunningPipeline
from benchmarks.source import BenchSource
from benchmarks.tables import goal_table

_MOST_BYTES = 1024.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes, after so many epochs."""

    epoch: int
    heap: int
    driver: int
    others: int


def _fill(dsn: str, tables: int) -> list[sql.Identifier]:
    names = [sql.Identifier(f"t{number:04d}") for number in range(tables)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name in names:
            connection.execute(sql.SQL("CREATE TABLE {} (id bigint PRIMARY KEY, a int, b text, c timestamptz)").format(name))
            connection.execute(sql.SQL("INSERT INTO {} SELECT g, 0, md5(g::text), now() FROM generate_series(1, 50) g").format(name))
    return names


def _change(connection: psycopg.Connection, names: Sequence[sql.Identifier], turn: int) -> None:
    """One transaction, and so one epoch: a row of each table is updated, or, in every other one, inserted."""
    statements = [sql.SQL("UPDATE {} SET a = a + 1 WHERE id = {}"), sql.SQL("INSERT INTO {} (id, a, b, c) VALUES ({}, 1, 'x', now())")]
    with connection.transaction():
        for number, name in enumerate(names):
            is_insert = (turn + number) % 2
            connection.execute(statements[is_insert].format(name, sql.Literal(1000 + turn if is_insert else turn % 50 + 1)))


def _sample(spark: SparkSession, epoch: int) -> Sample:
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark's own door to the JVM
    runtime = jvm.java.lang.Runtime.getRuntime()
    for _ in range(2):
        jvm.java.lang.System.gc()
        time.sleep(0.2)
    java = int(jvm.java.lang.ProcessHandle.current().pid())
    below = sum(_resident(pid) for pid in _descendants(os.getpid()) if pid != java)
    return Sample(epoch, int(runtime.totalMemory() - runtime.freeMemory()), _resident(os.getpid()), below)


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
    except OSError:
        return []
    return [each for child in children for each in (child, *_descendants(child))]


def measure(dsn: str, directory: Path, sink: str, *, tables: int, epochs: int, every: int, console: Console) -> list[Sample]:
    names = _fill(dsn, tables)
    samples = []
    with RunningPipeline(dsn, directory, sink, ["public.*"]) as run, psycopg.connect(dsn, autocommit=True) as connection:
        run.wait(lambda: run.is_streaming(tables), "all tables to stream")
        for turn in range(epochs + 1):
            if turn % every == 0:
                samples.append(_sample(run.spark, turn))
                console.print(f"  {_described(samples[-1])}", highlight=False)
            done = sum(rows for _, _, rows in run.epochs.ended)
            _change(connection, names, turn)
            run.wait(lambda done=done: sum(rows for _, _, rows in run.epochs.ended) >= done + tables, "the epoch")  # type: ignore[misc]
    return samples


def _described(sample: Sample) -> str:
    figures = (f"{name} {getattr(sample, name) / 1e6:7.1f} MB" for name in ("heap", "driver", "others"))
    return f"epoch {sample.epoch:5}: {', '.join(figures)}"


def slope(samples: Sequence[Sample], name: str) -> float:
    """Bytes an epoch, over the second half."""
    half = samples[len(samples) // 2 :]
    return float(statistics.linear_regression([each.epoch for each in half], [getattr(each, name) for each in half]).slope)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--every", type=int, default=25, help="epochs between two samples")
    parser.add_argument("--sink", choices=SINKS, default="delta")
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    arguments = parser.parse_args()
    console = Console()
    with BenchSource() as source, tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        console.print(f"Postgres {source.version}, into {arguments.sink}, {arguments.epochs:,} epochs of {arguments.tables} tables")
        place = Path(directory)
        sizes = {"tables": arguments.tables, "epochs": arguments.epochs, "every": arguments.every}
        samples = measure(source.dsn, place, arguments.sink, **sizes, console=console)
        version = source.version
    slopes = {name: slope(samples, name) / arguments.tables for name in ("heap", "driver", "others")}
    goals = [Goal(f"{name}: bytes an epoch and table ≤ {_MOST_BYTES:.0f}", each, each <= _MOST_BYTES) for name, each in slopes.items()]
    console.print(goal_table(goals))
    if arguments.save:
        figures = {
            "machine": machine(),
            "versions": versions(version),
            "sink": arguments.sink,
            "tables": arguments.tables,
            "samples": [asdict(each) for each in samples],
            "goals": [goal.to_json() for goal in goals],
        }
        console.print(f"saved as benchmarks/results/{save('memory', figures).name}")
    sys.exit(exit_code(goals))


if __name__ == "__main__":
    main()
