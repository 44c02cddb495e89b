"""Duration of a start with many tables, up to the first row in the spool: `make bench-tables`.

The steps are those of a run: schemas of all tables, publication and slot, then a capture that decodes one row
of every table. With a thousand tables the start must take at most 15 s; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql
from rich.console import Console

from benchmarks.goals import exit_code, start_goal
from benchmarks.results import machine, save, versions
from benchmarks.source import BenchSource
from benchmarks.tables import goal_table
from penstock.capture.provision import ensure_capture, inspect_coverage
from penstock.capture.settings import CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.position import Position
from penstock.postgres.catalog import inspect_schemas, inspect_tables
from penstock.postgres.connection import SourceAddress, connect
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader

_NAME = "many"
_WHOLE = "all, to the last row"
_PATIENCE_SECONDS = 300.0
_BATCH = 200


def create_tables(dsn: str, count: int) -> list[TableName]:
    """Ten columns each, as in the other benchmarks."""
    columns = sql.SQL(", ").join(sql.SQL("c{} text").format(sql.Literal(number)) for number in range(1, 10))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(_NAME)))
        for low in range(0, count, _BATCH):
            with connection.transaction():
                for number in range(low, min(count, low + _BATCH)):
                    name = sql.Identifier(_NAME, f"t{number:05d}")
                    connection.execute(
                        sql.SQL("CREATE TABLE {} (id bigint PRIMARY KEY, {})").format(name, columns)
                    )
    return [TableName(_NAME, f"t{number:05d}") for number in range(count)]


def insert_one_row_each(dsn: str, tables: list[TableName]) -> Position:
    with psycopg.connect(dsn, autocommit=True) as connection:
        with connection.transaction():
            for table in tables:
                connection.execute(
                    sql.SQL("INSERT INTO {} VALUES (1)").format(sql.Identifier(table.schema, table.name))
                )
        row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return Position.parse(str(row[0]))


@contextmanager
def _timed(name: str, into: dict[str, float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    into[name] = time.perf_counter() - began


def measure_start(dsn: str, count: int) -> dict[str, float]:
    """Seconds by step; the last one is the whole start."""
    tables = create_tables(dsn, count)
    address = SourceAddress.parse(dsn)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as spool, _timed(_WHOLE, seconds):
        with _timed("shapes of all tables", seconds), connect(address) as connection:
            inspect_schemas(connection, inspect_tables(connection))
        with _timed("publication and slot", seconds):
            ensure_capture(address, _NAME, _NAME, tables)
        with _timed("coverage, once satisfied", seconds):
            assert inspect_coverage(address, _NAME, tables).satisfied
        capture = SpoolCapture(CaptureSettings(address, _NAME, _NAME, Path(spool)))
        with _timed("rows inserted", seconds):
            position = insert_one_row_each(dsn, tables)
        with _timed("capture of all of them", seconds):
            capture.start()
            try:
                assert capture.wait_until(position, _PATIENCE_SECONDS)
            finally:
                capture.stop()
        reader = SpoolReader(Path(spool))
        assert reader.start is not None
        assert reader.end is not None
        assert len(reader.read(reader.start, reader.end).tables) == count
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    arguments = parser.parse_args()
    count, console = arguments.tables, Console()
    with BenchSource() as source:
        console.print(
            f"Postgres {source.version}, {count:,} tables of 10 columns, a row of each", highlight=False
        )
        seconds = measure_start(source.dsn, count)
        goal = start_goal(count, seconds[_WHOLE])
        figures = {
            "machine": machine(),
            "versions": versions(source.version),
            "tables": count,
            "seconds": seconds,
            "goals": [goal.to_json()],
        }
    for step, each in seconds.items():
        console.print(f"  {step:<26} {each:7.2f} s", highlight=False)
    console.print(goal_table([goal]))
    if arguments.save:
        console.print(f"saved as benchmarks/results/{save('tables', figures).name}")
    sys.exit(exit_code([goal]))


if __name__ == "__main__":
    main()
