"""DuckDB's Postgres scanner as a contender, in a separate process: `python -m benchmarks.duck`.

DuckDB and its extension are in wheels, which are downloaded once into a cache directory of this repository
and never installed. Without a network, `Unavailable` says so, and the other contenders are measured without
DuckDB.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.debezium import Unavailable

VERSION = "1.5.5"
_WHEELS = (f"duckdb=={VERSION}", f"duckdb-extension-postgres-scanner=={VERSION}")
_CACHE = Path(__file__).parents[1] / ".cache" / f"duckdb-{VERSION}"
_EXTENSION = f"duckdb_extension_postgres_scanner/extensions/v{VERSION}/postgres_scanner.duckdb_extension"


def ensure_duckdb() -> None:
    """Download it. Raises `Unavailable`."""
    if _CACHE.exists():
        return
    draft = _CACHE.with_suffix(".draft")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        str(draft),
    ]
    done = subprocess.run([*pip, *_WHEELS], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"fetching DuckDB failed: {done.stderr.strip()[-500:]}")
    draft.rename(_CACHE)


def duck_command(dsn: str, table: str, directory: Path, threads: int) -> list[str]:
    options = ["--dsn", dsn, "--table", table, "--directory", str(directory), "--threads", str(threads)]
    return [sys.executable, "-m", "benchmarks.duck", *options]


def _copy(dsn: str, table: str, directory: Path, threads: int) -> dict[str, float]:
    sys.path.insert(0, str(_CACHE))
    duckdb: Any = importlib.import_module("duckdb")
    with duckdb.connect() as session:
        session.execute(f"SET threads = {threads}")
        session.execute(f"LOAD '{_CACHE / _EXTENSION}'")
        wall, cpu = time.perf_counter(), time.process_time()
        session.execute(f"ATTACH '{dsn}' AS source (TYPE postgres, READ_ONLY)")
        # Fastest: each thread writes a separate file.
        session.execute(f"COPY (FROM source.{table}) TO '{directory}' (FORMAT parquet, PER_THREAD_OUTPUT)")
        report = {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return report | {"rows": sum(pq.read_metadata(path).num_rows for path in directory.rglob("*.parquet"))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.duck", description=__doc__)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--table", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    print(json.dumps(_copy(**vars(parser.parse_args()))))
