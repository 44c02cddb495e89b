"""A table of a million rows is added to a running pipeline under load: `make bench-add-table`.

Measures the lag of another table, by commit time, before, during and after the copy of the new one. At the
end both tables are compared with their source, while pipeline and load continue.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import yaml

from benchmarks.results import machine, save, versions
from benchmarks.source import BenchSource
from penstock.config.model import load_config
from penstock.pipeline.status import inspect_status

_PATIENCE_SECONDS = 900.0
_BEFORE_SECONDS = 30.0
_TRANSACTION_ROWS = 10


class Load(threading.Thread):
    """Inserts into and updates of the first table, at a steady rate."""

    def __init__(self, dsn: str, transactions_per_second: int) -> None:
        super().__init__(name="load", daemon=True)
        self._dsn = dsn
        self._pause = 1 / transactions_per_second
        self._ending = threading.Event()

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._ending.wait(self._pause):
                connection.execute(
                    "WITH new AS (INSERT INTO busy (v) SELECT 'x' FROM generate_series(1, %s) RETURNING id) "
                    "UPDATE busy SET v = 'y' WHERE id = (SELECT min(id) - 1 FROM new)",
                    (_TRANSACTION_ROWS,),
                )

    def stop(self) -> None:
        self._ending.set()
        self.join()


class Lag(threading.Thread):
    """Samples the lag of the pipeline once a second."""

    def __init__(self, config: Path) -> None:
        super().__init__(name="lag", daemon=True)
        self._config = config
        self._ending = threading.Event()
        self.samples: list[tuple[float, float]] = []
        self.states: dict[str, str] = {}

    def run(self) -> None:
        while not self._ending.wait(1.0):
            status = inspect_status(load_config(self._config))
            self.states = {
                str(name): table.state.value
                for name, table in (status.epoch.tables if status.epoch else {}).items()
            }
            if status.lag_seconds is not None:
                self.samples.append((time.monotonic(), status.lag_seconds))

    def stop(self) -> None:
        self._ending.set()
        self.join()

    def worst(self, low: float, high: float) -> tuple[float, float]:
        """The median and the greatest lag between two moments."""
        found = sorted(lag for at, lag in self.samples if low <= at <= high)
        return (found[len(found) // 2], found[-1]) if found else (0.0, 0.0)


def _penstock(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *arguments], check=True, capture_output=True, text=True
    ).stdout


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.2)


def measure(dsn: str, directory: Path, rows: int, rate: int) -> dict[str, float | int]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE busy (id bigserial PRIMARY KEY, v text); INSERT INTO busy (v) VALUES ('first')"
        )
        connection.execute(
            "CREATE SCHEMA later; CREATE TABLE later.big (id bigint "
            "PRIMARY KEY, a int, b text, c timestamptz, d numeric)"
        )
        connection.execute(
            "INSERT INTO later.big SELECT g, g %% 100, md5(g::text), now(), g / 3.0 "
            "FROM generate_series(1, %s) g",
            (rows,),
        )
    config = directory / "pipeline.yaml"
    document = {
        "pipeline": "bench",
        "source": {"dsn": dsn},
        "tables": ["public.busy"],
        "sink": {"delta": {"path": "lake"}},
    }
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    log = (directory / "run.log").open("w")
    pipeline = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "run", str(config)], stdout=log, stderr=log
    )
    load, lag = Load(dsn, rate), Lag(config)
    load.start()
    lag.start()
    try:
        _wait(
            lambda: lag.states.get("public.busy") == "streaming" and len(lag.samples) > _BEFORE_SECONDS,
            "the first table to be level",
        )
        added = time.monotonic()
        _penstock("tables", "add", str(config), "later.big")
        _wait(lambda: lag.states.get("later.big") == "streaming", "the new table to be level")
        level = time.monotonic()
        time.sleep(_BEFORE_SECONDS)
        report = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", "verify", str(config), "--json"],
            check=False,
            capture_output=True,
            text=True,
        )
        verified = time.monotonic()
        if report.returncode:
            raise RuntimeError(
                f"verify ended with {report.returncode}: {report.stdout[-2000:]} {report.stderr[-500:]}"
            )
        before, during = lag.worst(added - _BEFORE_SECONDS, added), lag.worst(added, level)
        return {
            "rows": rows,
            "transactions_per_second": rate,
            "seconds_to_level": level - added,
            "lag_before_p50": before[0],
            "lag_before_max": before[1],
            "lag_during_p50": during[0],
            "lag_during_max": during[1],
            "verify_seconds": verified - level - _BEFORE_SECONDS,
        }
    finally:
        lag.stop()
        load.stop()
        pipeline.terminate()
        pipeline.wait(120)
        log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=50, help="transactions a second, of eleven changes each")
    arguments = parser.parse_args()
    with BenchSource() as source, tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        figures = measure(source.dsn, Path(directory), arguments.rows, arguments.rate)
        print(
            f"Postgres {source.version}, a table of {arguments.rows:,} rows added under {arguments.rate} "
            "transactions/s"
        )
        print(f"  copied and level after            {figures['seconds_to_level']:7.1f} s")
        print(
            f"  lag of the other table, before    {figures['lag_before_p50']:7.1f} s (p50)  "
            f"{figures['lag_before_max']:7.1f} s (max)"
        )
        print(
            f"  lag of the other table, meanwhile {figures['lag_during_p50']:7.1f} s (p50)  "
            f"{figures['lag_during_max']:7.1f} s (max)"
        )
        print(f"  both equal to their source, by verify in {figures['verify_seconds']:.1f} s")
        saved = save(
            "add-table", {"machine": machine(), "versions": versions(source.version), "figures": figures}
        )
        print(f"saved as {saved.name}")


if __name__ == "__main__":
    main()
