"""The cost of a chunk: memory, and nothing left behind at the source."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from penstock.pipeline.snapshots.task import ChunkTask
from penstock.postgres.catalog import inspect_schema, inspect_tables
from penstock.postgres.chunks import Chunk, plan_chunks, read_chunk, snapshot_schema
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.snapshot_export import export_snapshot
from penstock.sinks.base import SnapshotPlace
from tests.support.fix_postgres import Database
from tests.support.waiting import wait_for

ROW_BYTES = 8_000_000
ROWS = 40

# In a separate process, as an executor's worker is.
WORKER = """
import pickle, resource, sys
from penstock.pipeline.snapshots.task import write_chunk
arguments = pickle.load(sys.stdin.buffer)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
file = write_chunk(*arguments)
print(file.rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_N16_memory_is_that_of_the_largest_row_however_many_there_are(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute(f"INSERT INTO t SELECT g, repeat('x', {ROW_BYTES}) FROM generate_series(1, {ROWS}) g")
    address = SourceAddress.parse(database.dsn)
    with export_snapshot(address) as exported:
        chunk = _chunk(address)
        task = ChunkTask(0, chunk, SnapshotPlace(str(tmp_path), snapshot_schema(chunk.schema), "snapshot"))
        given = pickle.dumps((address, exported.name, task))
        done = subprocess.run([sys.executable, "-c", WORKER], input=given, stdout=subprocess.PIPE, check=True)
    rows, grown_bytes = map(int, done.stdout.split())
    assert rows == ROWS
    assert grown_bytes < ROWS * ROW_BYTES * 0.8


def test_N08_a_reader_that_stops_early_leaves_no_transaction_behind(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 50000) g")
    address = SourceAddress.parse(database.dsn)
    with export_snapshot(address) as exported:
        with closing(read_chunk(address, exported.name, _chunk(address))) as batches:
            assert next(batches).num_rows
        wait_for(lambda: not _readers(database), "the reader's connection ends")


def _readers(database: Database) -> list[tuple[object, ...]]:
    mine = (
        "application_name LIKE 'penstock snapshot%' AND backend_type = 'client backend' AND datname = "
        "current_database()"
    )
    return database.query(f"SELECT pid FROM pg_stat_activity WHERE {mine}")


def _chunk(address: SourceAddress) -> Chunk:
    with connect(address) as connection:
        (table,) = inspect_tables(connection)
        (chunk,) = plan_chunks(connection, table, inspect_schema(connection, table), 1 << 30, None)
    return chunk
