"""Memory of a capture during a large transaction: `python -m benchmarks.large_transaction`.

A separate process captures one transaction of many rows, then another one that is rolled back at its end. Its
memory must stay below a gigabyte, every committed row must be in the spool once, and no file of the rolled
back transaction may remain; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from rich.console import Console
from rich.table import Table

from benchmarks.goals import Goal, exit_code, transaction_goals
from benchmarks.results import machine, save, versions
from benchmarks.tables import goal_table
from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.spool import SpoolReader
from penstock.testing.embedded import EmbeddedPostgres

_NAMES = ("committed before the capture began", "committed meanwhile", "rolled back at its end")
_PATIENCE_SECONDS = 1800.0
_SETTINGS = {
    "autovacuum": "off",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "shared_buffers": "512MB",
}
_CREATE = """
CREATE TABLE public.large (
    id bigint PRIMARY KEY, customer int NOT NULL, state text NOT NULL, amount numeric(12, 2) NOT NULL,
      note text, at timestamptz NOT NULL
)
"""
_INSERT = """
INSERT INTO public.large SELECT i, i %% 1000, 'state ' || i %% 7, i %% 10000 / 100.0, repeat('x',
  (i %% 50)::int), now()
FROM generate_series(%s::bigint, %s::bigint) i
"""


def main() -> None:
    arguments = _parse_arguments()
    if arguments.follow:
        _follow(*arguments.follow)
        return
    console = Console()
    table = Table(title=f"one transaction, Postgres {arguments.version}", title_justify="left")
    for heading in ("", "rows", "k rows/s", "peak memory, MB", "rows in the spool", "left in open/"):
        table.add_column(heading, justify="right" if heading else "left")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        root = Path(directory)
        root.chmod(0o755)
        with EmbeddedPostgres(root / "data", arguments.version, _SETTINGS, fsync=False) as server:
            reports = [
                _measure(server.dsn(), root / "committed", arguments.rows, commits=True, is_live=False),
                _measure(server.dsn(), root / "live", arguments.rows, commits=True, is_live=True),
                _measure(server.dsn(), root / "aborted", arguments.aborted_rows, commits=False, is_live=True),
            ]
            release = ".".join(str(number) for number in divmod(_server_version(server.dsn()), 10_000))
    goals: list[Goal] = []
    for name, report in zip(_NAMES, reports, strict=True):
        rate = "" if report["seconds"] is None else f"{report['rows'] / report['seconds'] / 1000:,.0f}"
        peak = f"{report['peak_bytes'] / 1e6:,.0f}"
        table.add_row(name, f"{report['rows']:,}", rate, peak, f"{report['spooled']:,}", str(report["left"]))
        facts = {
            "peak_bytes": report["peak_bytes"],
            "spooled_rows": report["spooled"],
            "left": report["left"],
        }
        goals += transaction_goals(name, **facts, expected_rows=report["expected"])
    console.print(table)
    console.print(goal_table(goals))
    if arguments.save:
        kept = {
            "machine": machine(),
            "versions": versions(release),
            **dict(zip(_NAMES, reports, strict=True)),
        }
        name = save("large-transaction", {**kept, "goals": [goal.to_json() for goal in goals]}).name
        console.print(f"saved as benchmarks/results/{name}")
    sys.exit(exit_code(goals))


def _server_version(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        return connection.info.server_version


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_transaction", description="One transaction of many rows."
    )
    parser.add_argument(
        "--rows", type=int, default=10_000_000, help="of the transaction that commits (default 10000000)"
    )
    parser.add_argument(
        "--aborted-rows", type=int, default=1_000_000, help="of the one that is rolled back (default 1000000)"
    )
    parser.add_argument("--version", type=int, default=18, help="of Postgres (default 18)")
    parser.add_argument("--no-save", dest="save", action="store_false", help="keep no file of the results")
    parser.add_argument("--follow", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(dsn: str, spool: Path, rows: int, *, commits: bool, is_live: bool) -> dict[str, Any]:
    slot = spool.name
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DROP PUBLICATION IF EXISTS large")
        connection.execute("DROP TABLE IF EXISTS public.large")
        connection.execute(_CREATE)
        ensure_capture(SourceAddress.parse(dsn), slot, "large", [TableName("public", "large")])
        if not is_live:
            _write(connection, rows, commits=commits)
        with _capturing(dsn, slot, spool) as process:
            started = time.monotonic()
            if is_live:
                _write(connection, rows, commits=commits)
            connection.execute("INSERT INTO public.large VALUES (0, 0, '', 0, NULL, now())")
            (position,) = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone() or ("",)
            # Moves the WAL past that position.
            connection.execute("CREATE TABLE IF NOT EXISTS public.unpublished (id int)")
            report = _ask(process, str(position))
            seconds = time.monotonic() - started
        connection.execute(sql.SQL("SELECT pg_drop_replication_slot({})").format(sql.Literal(slot)))
    segments = SpoolReader(spool).segments()
    return {
        **report,
        "rows": rows,
        "seconds": seconds if commits else None,
        "spooled": sum(segment.rows for segment in segments),
        "expected": rows + 1 if commits else 1,
    }


def _write(connection: psycopg.Connection[Any], rows: int, *, commits: bool) -> None:
    with connection.transaction(force_rollback=not commits):
        connection.execute(_INSERT, [1, rows])


@contextmanager
def _capturing(dsn: str, slot: str, spool: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.large_transaction", "--follow", dsn, slot, str(spool)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def _ask(process: subprocess.Popen[str], position: str) -> dict[str, Any]:
    answer, _ = process.communicate(position + "\n", timeout=_PATIENCE_SECONDS)
    report: dict[str, Any] = json.loads(answer)
    return report


# --- in the process that captures ---------------------------------------------------------------------------


def _follow(dsn: str, slot: str, spool: str) -> None:
    """Capture until the position on the first line of the input, and print the figures."""
    settings = CaptureSettings(
        SourceAddress.parse(dsn), slot, "large", Path(spool), limits=CaptureLimits(quiet_seconds=0.2)
    )
    capture = SpoolCapture(settings)
    capture.start()
    capture.wait_beyond(Position.ZERO, _PATIENCE_SECONDS)
    print("ready", flush=True)
    if not capture.wait_until(Position.parse(sys.stdin.readline().strip()), _PATIENCE_SECONDS):
        sys.exit("the capture did not come to the end")
    left = [str(path) for path in Path(spool).glob("open/*")]
    capture.stop()
    print(json.dumps({"peak_bytes": _peak_bytes(), "left": len(left)}), flush=True)


def _peak_bytes() -> int:
    """The peak of this program alone: getrusage may report the parent's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) * 1024


if __name__ == "__main__":
    main()
