"""How long a start takes when there are many tables: from nothing to the first row in the spool. `make bench-tables`.

The steps are those of a run: shapes of all tables, publication and slot, then a capture that decodes one row of every table.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

from benchmarks.source import BenchSource
from penstock.capture.provision import ensure_capture, inspect_coverage
from penstock.capture.settings import CaptureSettings
from penstock.capture.spooling import SpoolCapture
from penstock.position import Position
from penstock.postgres.catalog import inspect_schemas, inspect_tables
from penstock.postgres.connection import SourceAddress, connect
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader

_NAME = "many"
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
                    connection.execute(sql.SQL("CREATE TABLE {} (id bigint PRIMARY KEY, {})").format(name, columns))
    return [TableName(_NAME, f"t{number:05d}") for number in range(count)]


def insert_one_row_each(dsn: str, tables: list[TableName]) -> Position:
    with psycopg.connect(dsn, autocommit=True) as connection:
        with connection.transaction():
            for table in tables:
                connection.execute(sql.SQL("INSERT INTO {} VALUES (1)").format(sql.Identifier(table.schema, table.name)))
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
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as spool, _timed("all, to the last row", seconds):
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
    count = parser.parse_args().tables
    with BenchSource() as source:
        print(f"Postgres {source.version}, {count:,} tables of 10 columns, a row of each")
        for step, seconds in measure_start(source.dsn, count).items():
            print(f"  {step:<26} {seconds:7.2f} s")


if __name__ == "__main__":
    main()
