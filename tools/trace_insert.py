"""Print the modules of penstock that one insert-only epoch crosses, by a call trace of a real run.

    python -m tools.trace_insert [--rows N] [--src DIRECTORY]

Starts an embedded Postgres and `penstock run` into a Delta table, waits until the table streams, executes one
INSERT, and waits until its position is confirmed to the server. A module counts if one of its functions was
called in between: in the driver, in the reader process or in a Python worker. `--src` traces another version
of the package.

Threads that supervise the pipeline run beside the INSERT whether or not there is one: the main thread of the
driver, maintenance, and the checks of slot and publication. Modules that only they call are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString

import psycopg

from penstock.testing.embedded import EmbeddedPostgres
from tools import call_recorder

ROOT = Path(__file__).parents[1]
PIPELINE = "traced"
DEFAULT_ROWS = 10_000
"""More than the driver applies itself, so that executors take part."""

_SETTLE_SECONDS = 10.0
_DEADLINE_SECONDS = 300.0
_SUPERVISING = ("penstock-watch", "penstock-maintenance")


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a module in one thread."""

    at_ns: int
    pid: int
    thread: str
    module: str

    @classmethod
    def parse(cls, line: str) -> Call:
        at_ns, pid, thread, module = line.rstrip("\n").split("\t")
        return cls(int(at_ns), int(pid), thread, module)


@dataclass(frozen=True, slots=True)
class Trace:
    """All first calls between the INSERT and its confirmation, in order of time."""

    calls: Sequence[Call]
    driver: int

    @property
    def reader(self) -> int | None:
        return next((call.pid for call in self.calls if call.thread == "penstock-capture"), None)

    def process(self, call: Call) -> str:
        names = {self.driver: "driver", self.reader: "reader"}
        return names.get(call.pid, "worker")

    def is_supervising(self, call: Call) -> bool:
        return call.thread in _SUPERVISING or (call.pid == self.driver and call.thread == "MainThread")

    def on_the_way(self) -> dict[str, list[Call]]:
        """By module, in the order of first calls."""
        return _by_module(call for call in self.calls if not self.is_supervising(call))

    def beside(self) -> list[str]:
        """Modules that only supervising threads called."""
        return [module for module in _by_module(self.calls) if module not in self.on_the_way()]


def _by_module(calls: Iterable[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for call in calls:
        found.setdefault(call.module, []).append(call)
    return found


def trace_insert(source: Path, rows: int, directory: Path) -> Trace:
    """Run a pipeline with the package in `source`, and trace one INSERT of so many rows."""
    with (
        EmbeddedPostgres(directory / "postgres") as server,
        psycopg.connect(server.dsn(), autocommit=True) as connection,
    ):
        connection.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, item text, amount numeric(10, 2), at timestamptz)"
        )
        _insert(connection, 0, 100)
        config = directory / "pipeline.yaml"
        config.write_text(json.dumps(_config(server.dsn())), encoding="utf-8")
        calls = _prepare_recording(directory)
        with (directory / "run.log").open("wb") as log:
            environment = _environment(source, calls)
            command = [sys.executable, "-m", "penstock.cli.main", "run", str(config)]
            pipeline = subprocess.Popen(
                command, env=environment, cwd=directory, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            _trace(connection, pipeline, directory, calls, rows)
        finally:
            pipeline.terminate()
            pipeline.wait(60)
        return Trace(_load_calls(calls), pipeline.pid)


def _trace(
    connection: psycopg.Connection, pipeline: subprocess.Popen[bytes], directory: Path, calls: Path, rows: int
) -> None:
    records = directory / "lake" / "penstock_epochs" / PIPELINE
    _await("the table streams", pipeline, lambda: _is_streaming(records))
    time.sleep(_SETTLE_SECONDS)
    _record(calls, is_on=True)
    _insert(connection, 1_000, rows)
    # The end of the commit or later. An address from before the INSERT would be confirmed by an idle epoch
    # too.
    end = _query(connection, "SELECT pg_current_wal_insert_lsn()::text")
    confirmed = "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE NOT temporary"
    _await("the INSERT is confirmed", pipeline, lambda: _query(connection, confirmed, end) is True)
    _record(calls, is_on=False)


def _insert(connection: psycopg.Connection, first: int, rows: int) -> None:
    statement = (
        "INSERT INTO orders SELECT g, 'item ' || g, g / 7.0, now() "
        "FROM generate_series(%s::bigint, %s::bigint) g"
    )
    connection.execute(statement, (first, first + rows - 1))


def _query(connection: psycopg.Connection, statement: LiteralString, *arguments: object) -> object:
    row = connection.execute(statement, arguments or None).fetchone()
    return row[0] if row is not None else None


def _config(dsn: str) -> dict[str, object]:
    return {
        "pipeline": PIPELINE,
        "source": {"dsn": dsn},
        "tables": ["public.orders"],
        "sink": {"delta": {"path": "lake"}},
        "trigger": "100 ms",
        "spark": {"master": "local[2]"},
    }


def _prepare_recording(directory: Path) -> Path:
    calls = directory / "calls"
    hook = calls / "hook"
    hook.mkdir(parents=True)
    (calls / call_recorder.SWITCH).write_bytes(b"\0")
    shutil.copy(ROOT / "tools" / "call_recorder.py", hook / "sitecustomize.py")
    return calls


def _environment(source: Path, calls: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, (calls / "hook", source)))
    return {**os.environ, "PYTHONPATH": path, call_recorder.DIRECTORY: str(calls)}


def _record(calls: Path, *, is_on: bool) -> None:
    with (calls / call_recorder.SWITCH).open("r+b") as file:
        file.write(bytes([is_on]))


def _is_streaming(records: Path) -> bool:
    names = sorted(records.glob("*.json"))
    if not names:
        return False
    tables: Mapping[str, Mapping[str, object]] = json.loads(names[-1].read_text(encoding="utf-8"))["tables"]
    return all(table["state"] == "streaming" for table in tables.values())


def _await(what: str, pipeline: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not condition():
        if pipeline.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"waiting until {what}: the pipeline ended or took too long; see run.log")
        time.sleep(0.05)


def _load_calls(calls: Path) -> list[Call]:
    found = [
        Call.parse(line)
        for file in calls.glob("*.calls")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return sorted(found, key=lambda call: call.at_ns)


def _report(trace: Trace) -> str:
    way = trace.on_the_way()
    lines = []
    for number, (module, calls) in enumerate(way.items(), 1):
        places = dict.fromkeys(
            f"{trace.process(call)}/{call.thread.partition('_')[0]}"
            for call in calls
            if not trace.is_supervising(call)
        )
        lines.append(f"{number:>3}  {module.removeprefix('penstock.'):<44} {', '.join(places)}")
    packages: dict[str, int] = {}
    for module in way:
        package = module.removeprefix("penstock.").rpartition(".")[0] or "top level"
        packages[package] = packages.get(package, 0) + 1
    lines += ["", "by package: " + ", ".join(f"{package} {count}" for package, count in packages.items())]
    lines += [f"only in supervising threads, {len(trace.beside())}: {', '.join(trace.beside())}"]
    lines += [f"{len(way)} modules on the way of the INSERT"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the modules that one INSERT crosses.")
    parser.add_argument(
        "--rows", type=int, default=DEFAULT_ROWS, help=f"rows of the INSERT; default {DEFAULT_ROWS:,}"
    )
    parser.add_argument(
        "--src",
        type=Path,
        default=ROOT / "src",
        help="directory of the package; default: src of this checkout",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="an empty directory for the files of the run; default: a temporary directory",
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-trace-") as temporary:
        Path(temporary).chmod(0o755)
        print(
            _report(trace_insert(given.src.resolve(), given.rows, (given.keep or Path(temporary)).resolve()))
        )


if __name__ == "__main__":
    main()
