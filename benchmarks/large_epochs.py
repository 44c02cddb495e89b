"""Memory of Python workers while an epoch is larger than a task may be: `python -m benchmarks.large_epochs`.

Each case copies a table, changes it in one transaction, and lets `penstock run --once` apply that. Figures:
the peak RSS of any Python worker and the time of the run. The run must end, and a worker must stay below the
bound that `docs/explanation/memory.md` names; else the exit code is 1. `--verify` also compares the tables
row by row, which takes much longer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.results import machine, save, versions
from penstock.testing.embedded import EmbeddedPostgres

_SETTINGS = {
    "autovacuum": "off",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "shared_buffers": "512MB",
}
_MOST_BYTES = 1 << 30
_DOCUMENTS = (
    "CREATE TABLE public.large (id bigint PRIMARY KEY, note text, body text)",
    (
        "INSERT INTO public.large SELECT i, 'first', repeat(md5(i::text), 32768) "
        "FROM generate_series(1, {rows}) i"
    ),
)
_ROWS = (
    (
        "CREATE TABLE public.large (id bigint "
        "PRIMARY KEY, customer int, state text, amount numeric(12, 2), note text, at timestamptz)"
    ),
    """INSERT INTO public.large SELECT i, i % 1000, 'state ' || i % 7, i % 10000 / 100.0,
      repeat('x', (i % 50)::int), now()
    FROM generate_series(1, {rows}) i""",
)
# One document is unchanged TOAST, and so is that of the key change.
_UPDATE_DOCUMENTS = (
    "UPDATE public.large SET body = repeat(md5(id::text || 'x'), 32768) WHERE id > 1",
    "UPDATE public.large SET note = 'second' WHERE id = 1",
)
_MOVE_DOCUMENTS = ("UPDATE public.large SET id = -id WHERE id = 2", *_UPDATE_DOCUMENTS)


@dataclass(frozen=True, slots=True)
class Case:
    sink: str
    prepare: tuple[str, ...]
    change: tuple[str, ...]
    rows: int
    spark: Mapping[str, str]


CASES = {
    "delta: 1.5 M deletes": Case(
        "delta", _ROWS, ("DELETE FROM public.large",), 1_500_000, {"spark.driver.maxResultSize": "8m"}
    ),
    "delta: 2,200 MB of documents": Case("delta", _DOCUMENTS, _UPDATE_DOCUMENTS, 2200, {}),
    "delta: 2,200 MB of documents, a key change": Case("delta", _DOCUMENTS, _MOVE_DOCUMENTS, 2200, {}),
    "iceberg: 2,200 MB of documents": Case("iceberg", _DOCUMENTS, _UPDATE_DOCUMENTS, 2200, {}),
    "iceberg: 2,200 MB of documents, a key change": Case("iceberg", _DOCUMENTS, _MOVE_DOCUMENTS, 2200, {}),
    "iceberg: 1.5 M updates": Case(
        "iceberg", _ROWS, ("UPDATE public.large SET note = 'second'",), 1_500_000, {}
    ),
    "iceberg: 5 M updates": Case(
        "iceberg", _ROWS, ("UPDATE public.large SET note = 'second'",), 5_000_000, {}
    ),
}


def main() -> None:
    arguments = _parse_arguments()
    console = Console()
    table = Table(title="one transaction in one epoch", title_justify="left")
    for heading in ("", "rows", "seconds", "peak RSS of a Python worker, MB", "applied"):
        table.add_column(heading, justify="right" if heading else "left")
    chosen = {name: case for name, case in CASES.items() if arguments.only in name}
    reports = {}
    for number, (name, case) in enumerate(chosen.items()):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=arguments.directory) as directory:
            root = Path(directory)
            root.chmod(0o755)
            with EmbeddedPostgres(root / "data", 18, _SETTINGS, fsync=False) as server:
                report = _measure(
                    case, server.dsn(), root, number, arguments.timeout, verify=arguments.verify
                )
        reports[name] = report
        peak = f"{report['peak_bytes'] / 1e6:,.0f}"
        table.add_row(
            name, f"{case.rows:,}", f"{report['seconds']:.0f}", peak, "yes" if report["is_applied"] else "no"
        )
        console.print(json.dumps({name: report}))
    console.print(table)
    if arguments.save:
        path = save("large-epochs", {"machine": machine(), "versions": versions("18"), **reports})
        console.print(f"saved as benchmarks/results/{path.name}")
    sys.exit(
        0 if all(each["is_applied"] and each["peak_bytes"] <= _MOST_BYTES for each in reports.values()) else 1
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_epochs", description="Epochs that are larger than a task may be."
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--timeout", type=float, default=1200.0, help="seconds that one run may take (default 1200)"
    )
    parser.add_argument("--verify", action="store_true", help="compare source and target row by row")
    parser.add_argument("--directory", help="where server and tables go; default: the temporary directory")
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    return parser.parse_args()


def _measure(
    case: Case, dsn: str, root: Path, number: int, timeout: float, *, verify: bool
) -> dict[str, Any]:
    sinks = {
        "delta": {"path": str(root / "lake")},
        "iceberg": {"catalog": f"lake_{number}", "warehouse": str(root / "lake")},
    }
    config = {
        "pipeline": "large",
        "source": {"dsn": dsn},
        "tables": ["public.large"],
        "sink": {case.sink: sinks[case.sink]},
        "state": str(root / "state"),
        "spark": {"conf": dict(case.spark)},
    }
    path = root / "large.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    _execute(dsn, case.prepare, case.rows)
    _penstock("run", path, timeout)
    _execute(dsn, case.change, case.rows)
    started = time.monotonic()
    peak = _penstock("run", path, timeout)
    seconds = time.monotonic() - started
    is_applied = peak is not None and (not verify or _penstock("verify", path, timeout) is not None)
    return {"rows": case.rows, "seconds": seconds, "peak_bytes": peak or 0, "is_applied": is_applied}


def _execute(dsn: str, statements: tuple[str, ...], rows: int) -> None:
    with psycopg.connect(dsn) as connection:
        for statement in statements:
            connection.execute(statement.format(rows=rows).encode())


def _penstock(command: str, config: Path, timeout: float) -> int | None:
    """The peak RSS of a Python worker; None if the command failed, or did not end."""
    arguments = ["--once"] if command == "run" else []
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", command, str(config), *arguments]
    ) as process:
        workers = _Workers(process.pid)
        workers.start()
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
            print(f"{command} did not end within {timeout:.0f} s", file=sys.stderr)
        finally:
            workers.stop()
    return workers.peak_bytes if code == 0 else None


class _Workers(threading.Thread):
    """Samples the Python workers below a process, several times a second."""

    def __init__(self, root: int) -> None:
        super().__init__(name="workers", daemon=True)
        self._root = root
        self._stopped = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._stopped.wait(0.1):
            for pid in _descendants(self._root):
                self.peak_bytes = max(self.peak_bytes, _worker_bytes(pid))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(
                stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            )
        except (OSError, IndexError):
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _worker_bytes(pid: int) -> int:
    """Peak memory of a Python worker of Spark; 0 for any other process."""
    try:
        if (
            b"pyspark" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            or b"java" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ):
            return 0
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


if __name__ == "__main__":
    main()
