"""The time that other tables wait while a table is resynced: `make bench-resync`.

A large and a small table stream under load; then the large one is resynced. The benchmark reports the longest
epoch during the resync and the longest one before it. It also reports the time that Spark needs to rewrite
all rows of the table, which a swap without metadata commits would take inside an epoch. The goal is at most 2
s for any size; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psycopg
from rich.console import Console

from benchmarks.goals import Goal, exit_code
from benchmarks.results import machine, save, versions
from benchmarks.running import SINKS, Load, RunningPipeline
from benchmarks.source import BenchSource
from benchmarks.tables import goal_table
from penstock.pipeline.sink_factory import open_sink
from penstock.pipeline.table_overrides import change_overrides, load_overrides
from penstock.schema import TableName

_MOST_SECONDS = 2.0
_USUAL_SECONDS = 20.0
_BIG = TableName("public", "big")


def _fill(dsn: str, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE busy (id bigserial PRIMARY KEY, v text); INSERT INTO busy (v) VALUES ('first')"
        )
        connection.execute(
            "CREATE TABLE big (id bigint PRIMARY KEY, a int, b text, c text, d timestamptz, e numeric)"
        )
        connection.execute(
            "INSERT INTO big SELECT g, g %% 100, md5(g::text), md5((-g)::text) || md5((g * 7)::text), "
            "now(), g / 3.0 "
            "FROM generate_series(1, %s) g",
            (rows,),
        )


def _work(connection: psycopg.Connection, turn: int) -> None:
    connection.execute("INSERT INTO busy (v) SELECT 'x' FROM generate_series(1, 10)")
    connection.execute("UPDATE big SET a = a + 1 WHERE id BETWEEN %s AND %s", (turn * 5 + 1, turn * 5 + 5))


def measure(dsn: str, directory: Path, sink: str, rows: int, rate: int) -> dict[str, float | int | str]:
    _fill(dsn, rows)
    with RunningPipeline(dsn, directory, sink, ["public.*"]) as run, Load(dsn, rate, _work):
        run.wait(lambda: run.is_streaming(2), "both tables to stream")
        time.sleep(_USUAL_SECONDS)
        ordered = time.monotonic()
        change_overrides(run.config.state, lambda orders: orders.request_resync([_BIG]))
        run.wait(lambda: not load_overrides(run.config.state).resync, "the resync to end")
        ended = time.monotonic()
        usual, during = (
            run.epochs.seconds(ordered - _USUAL_SECONDS, ordered),
            run.epochs.seconds(ordered, ended + 1),
        )
        began = time.monotonic()
        open_sink(run.config, run.spark).read(_BIG).write.parquet(str(directory / "written"))
        written = time.monotonic() - began
    return {
        "sink": sink,
        "rows": rows,
        "resync_seconds": ended - ordered,
        "usual_epoch_p50": usual[len(usual) // 2],
        "usual_epoch_max": usual[-1],
        "resync_epoch_p50": during[len(during) // 2],
        "resync_epoch_max": during[-1],
        "swap_epoch": run.epochs.seconds_of(ended),
        "all_rows_written_seconds": written,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rate", type=int, default=10, help="transactions a second in each table")
    parser.add_argument("--sink", choices=SINKS, default="delta")
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    arguments = parser.parse_args()
    console = Console()
    with BenchSource() as source, tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        found = measure(source.dsn, Path(directory), arguments.sink, arguments.rows, arguments.rate)
        version = source.version
    worst = float(found["resync_epoch_max"])
    goals = [
        Goal(
            f"longest epoch while {arguments.rows:,} rows are resynced ≤ {_MOST_SECONDS:.0f} s",
            worst,
            worst <= _MOST_SECONDS,
        )
    ]
    console.print(
        f"Postgres {version}, into {arguments.sink}, {arguments.rows:,} rows, {arguments.rate} "
        "transactions/s in each table"
    )
    for name, value in found.items():
        if isinstance(value, float):
            console.print(f"  {name:<26} {value:8.2f} s", highlight=False)
    console.print(goal_table(goals))
    if arguments.save:
        figures = {
            "machine": machine(),
            "versions": versions(version),
            "figures": found,
            "goals": [goal.to_json() for goal in goals],
        }
        console.print(f"saved as benchmarks/results/{save('resync', figures).name}")
    sys.exit(exit_code(goals))


if __name__ == "__main__":
    main()
