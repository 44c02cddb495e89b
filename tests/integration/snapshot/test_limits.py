"""Memory and locks that a snapshot takes at the source and in executors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support.fix_postgres import Database

_ROW_BYTES = 8 << 20
_ROWS = 40

# In a separate process, whose memory can be measured.
_SCRIPT = """
import resource, sys
from pathlib import Path
from penstock.pipeline.snapshots.task import ChunkTask, write_chunk
from penstock.postgres.catalog import inspect_tables
from penstock.postgres.chunks import cut_chunks, snapshot_schema
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.snapshot_export import export_snapshot
from penstock.postgres.snapshot_export import inspect_outline
from penstock.sinks.base import SnapshotPlace

address = SourceAddress.parse(sys.argv[1])
with export_snapshot(address) as exported:
    with connect(address) as connection:
        (chunk,) = cut_chunks(inspect_outline(connection, inspect_tables(connection)[0]), 1 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    place = SnapshotPlace(sys.argv[2], snapshot_schema(chunk.schema), "huge")
    file = write_chunk(address, exported.name, ChunkTask(0, chunk, place))
print(file.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_N16_memory_is_bounded_by_rows_not_by_the_chunk(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE huge (id int PRIMARY KEY, v text); ALTER TABLE huge ALTER v SET STORAGE EXTERNAL"
    )
    for number in range(_ROWS):
        database.execute(f"INSERT INTO huge SELECT {number}, repeat('{number % 10}', {_ROW_BYTES})")
    script = tmp_path / "read.py"
    script.write_text(textwrap.dedent(_SCRIPT), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), database.dsn, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows, peak_kib = map(int, done.stdout.split())
    assert rows == _ROWS
    assert peak_kib * 1024 < _ROWS * _ROW_BYTES, f"{peak_kib} KiB for {_ROWS} rows of {_ROW_BYTES} bytes"
