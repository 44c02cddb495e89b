"""Memory of a running pipeline over many epochs of many tables. `make bench-memory`.

Every epoch is one transaction that changes one row of every table: it updates one table in ten, and inserts
into the others. An update of a table takes a Spark job, an insert of a few rows none, so more updates would
only take more time. Every few epochs the benchmark samples the JVM's heap after a full collection, and the
resident memory of the JVM without its heap, of the driver (this process), of the stream reader and of the
Python workers.

A line through the samples of the second half must not rise by more than 5 % of their mean; else the exit code
is 1. The first half is for warm-up: tables gather small files until compaction makes them one, and caches
fill. The memory of Python workers is only reported: Spark starts and ends them as it needs them.

SIGTERM ends the run after the current epoch, with the results so far.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
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

_MOST_RISE = 0.05
_BOUNDED = ("heap", "jvm_besides", "driver", "reader")
_UPDATED_OF = 10
_READER = b"python_streaming_source_runner"
_FEWEST_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory in bytes, after this number of epochs and seconds."""

    epoch: int
    seconds: float
    heap: int
    """Live objects in the JVM's heap."""
    heap_committed: int
    jvm: int
    """Resident memory of the JVM, with its heap."""
    jvm_besides: int
    """Resident memory of the JVM beyond the heap that it holds: classes, compiled code, threads, buffers."""
    driver: int
    reader: int
    workers: int


def _fill(dsn: str, tables: int) -> list[sql.Identifier]:
    names = [sql.Identifier(f"t{number:04d}") for number in range(tables)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name in names:
            connection.execute(
                sql.SQL("CREATE TABLE {} (id bigint PRIMARY KEY, a int, b text, c timestamptz)").format(name)
            )
            connection.execute(
                sql.SQL(
                    "INSERT INTO {} SELECT g, 0, md5(g::text), now() FROM generate_series(1, 50) g"
                ).format(name)
            )
    return names


def _change(connection: psycopg.Connection, names: Sequence[sql.Identifier], turn: int) -> None:
    """Make one transaction, and so one epoch: insert a row into each table, or update one, in one table of
    ten.
    """
    insert = sql.SQL("INSERT INTO {} (id, a, b, c) VALUES ({}, 1, 'x', now())")
    update = sql.SQL("UPDATE {} SET a = a + 1 WHERE id = {}")
    statements = [
        update.format(name, sql.Literal(turn % 50 + 1))
        if (turn + number) % _UPDATED_OF == 0
        else insert.format(name, sql.Literal(1000 + turn))
        for number, name in enumerate(names)
    ]
    with connection.transaction():
        connection.execute(sql.SQL("; ").join(statements))


def _sample(spark: SparkSession, epoch: int, seconds: float) -> Sample:
    jvm: Any = spark._jvm  # noqa: SLF001 - pyspark's own door to the JVM
    runtime = jvm.java.lang.Runtime.getRuntime()
    for _ in range(2):
        jvm.java.lang.System.gc()
        time.sleep(0.2)
    java = int(jvm.java.lang.ProcessHandle.current().pid())
    below = list(_descendants(java))
    readers = [pid for pid in below if _READER in _command(pid)]
    committed, resident = int(runtime.totalMemory()), _resident(java)
    return Sample(
        epoch,
        round(seconds, 1),
        heap=committed - int(runtime.freeMemory()),
        heap_committed=committed,
        jvm=resident,
        jvm_besides=resident - committed,
        driver=_resident(os.getpid()),
        reader=sum(map(_resident, readers)),
        workers=sum(_resident(pid) for pid in below if pid not in readers),
    )


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _children(pid: int) -> list[int]:
    """None, if the process has ended."""
    found: list[int] = []
    with suppress(OSError):
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with suppress(OSError):  # a thread that has just ended
                found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


class Stop:
    """Whether SIGTERM asked for an early end."""

    def __init__(self) -> None:
        self.is_asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.is_asked = True


def measure(
    dsn: str, directory: Path, sink: str, *, tables: int, epochs: int, every: int, console: Console
) -> list[Sample]:
    names = _fill(dsn, tables)
    samples: list[Sample] = []
    stop = Stop()
    with (
        RunningPipeline(dsn, directory, sink, ["public.*"]) as run,
        psycopg.connect(dsn, autocommit=True) as connection,
    ):
        run.wait(lambda: run.is_streaming(tables), "all tables to stream")
        started = time.monotonic()
        for turn in range(epochs + 1):
            if turn % every == 0 or stop.is_asked:
                samples.append(_sample(run.spark, turn, time.monotonic() - started))
                console.print(f"  {_described(samples[-1])}", highlight=False)
                if stop.is_asked:
                    break
            done = sum(rows for _, _, rows in run.epochs.ended)
            _change(connection, names, turn)
            run.wait(
                lambda done=done: sum(rows for _, _, rows in run.epochs.ended) >= done + tables,  # type: ignore[misc]
                "the epoch",
            )
    return samples


def _described(sample: Sample) -> str:
    figures = (f"{name} {getattr(sample, name) / 1e6:7.1f} MB" for name in (*_BOUNDED, "jvm", "workers"))
    return f"epoch {sample.epoch:5}, {sample.seconds:7.0f} s: {', '.join(figures)}"


def _second_half(samples: Sequence[Sample]) -> Sequence[Sample]:
    return samples[len(samples) // 2 :]


def slope(samples: Sequence[Sample], name: str) -> float:
    """Bytes an epoch, over the second half."""
    half = _second_half(samples)
    return float(
        statistics.linear_regression(
            [each.epoch for each in half], [getattr(each, name) for each in half]
        ).slope
    )


def rise(samples: Sequence[Sample], name: str) -> float:
    """The rise of a figure over the second half, as a fraction of its mean."""
    half = _second_half(samples)
    epochs = half[-1].epoch - half[0].epoch
    return slope(samples, name) * epochs / statistics.fmean(getattr(each, name) for each in half)


def memory_goals(samples: Sequence[Sample], tables: int) -> Iterator[Goal]:
    for name in _BOUNDED:
        measured = rise(samples, name)
        yield Goal(f"{name}: % that it rises by ≤ {_MOST_RISE:.0%}", measured * 100, measured <= _MOST_RISE)
        yield Goal(f"{name}: bytes an epoch and table", slope(samples, name) / tables, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--every", type=int, default=25, help="epochs between two samples")
    parser.add_argument("--sink", choices=SINKS, default="delta")
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    arguments = parser.parse_args()
    if arguments.epochs // arguments.every + 1 < _FEWEST_SAMPLES:
        parser.error(f"--epochs must be at least {_FEWEST_SAMPLES - 1} times --every")
    console = Console()
    with BenchSource() as source, tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        console.print(
            f"Postgres {source.version}, into {arguments.sink}, {arguments.epochs:,} epochs of "
            f"{arguments.tables} tables"
        )
        place = Path(directory)
        sizes = {"tables": arguments.tables, "epochs": arguments.epochs, "every": arguments.every}
        samples = measure(source.dsn, place, arguments.sink, **sizes, console=console)
        version = source.version
    if len(samples) < _FEWEST_SAMPLES:
        sys.exit(f"stopped after {len(samples)} samples, which is too early to tell")
    goals = list(memory_goals(samples, arguments.tables))
    console.print(goal_table(goals))
    if arguments.save:
        figures = {
            "machine": machine(),
            "versions": versions(version),
            "sink": arguments.sink,
            "tables": arguments.tables,
            "epochs": samples[-1].epoch,
            "samples": [asdict(each) for each in samples],
            "goals": [goal.to_json() for goal in goals],
        }
        console.print(f"saved as benchmarks/results/{save('memory', figures).name}")
    sys.exit(exit_code(goals))


if __name__ == "__main__":
    main()
