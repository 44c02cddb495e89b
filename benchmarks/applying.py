"""Penstock pipelines as contenders: they apply a backlog to tables, on a running Spark session."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.contenders import Measurement
from benchmarks.source import BenchSource, ServerCpu

SINKS = ("delta", "iceberg")


class SparkClient:
    """A process with a Spark session, which executes requests one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.answer()

    def ask(self, task: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the Spark session has ended; what it said is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def do(self, task: Mapping[str, Any]) -> dict[str, Any]:
        self.ask(task)
        return self.answer()


@contextmanager
def spark_client() -> Iterator[SparkClient]:
    command = [sys.executable, "-m", "benchmarks.apply_client"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield SparkClient(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


class Mirror:
    """A separate pipeline for one table, with a separate target directory."""

    def __init__(
        self,
        client: SparkClient,
        source: BenchSource,
        sink: str,
        number: int,
        directory: Path,
        **options: object,
    ) -> None:
        self._client = client
        self._source = source
        name = f"{sink}_{number}"
        place = str(directory / name / "lake")
        sinks = {"delta": {"path": place}, "iceberg": {"catalog": f"lake_{number}", "warehouse": place}}
        self.config: dict[str, object] = {
            "pipeline": name,
            "source": {"dsn": source.dsn},
            "tables": ["bench.*"],
            "sink": {sink: sinks[sink]},
            "state": str(directory / name / "state"),
            **options,
        }
        self._slot = f"penstock_{name}"

    def copy(self) -> None:
        """Copy the source to the target. From then on the slot keeps all changes."""
        self._client.do({"do": "copy", "config": self.config})

    def drain(self, rows: int) -> Measurement:
        with ServerCpu(self._source.dsn, self._slot) as server:
            report = self._client.do(
                {"do": "drain", "config": self.config, "goal": self._source.wal_position()}
            )
        if report["rows"] != rows:
            raise AssertionError(f"{self.config['pipeline']} applied {report['rows']} rows, not {rows}")
        return Measurement(rows, report["wall_seconds"], report["cpu_seconds"], server.seconds)

    @contextmanager
    def following(self) -> Iterator[dict[str, Any]]:
        """Run during the block; afterwards the dictionary has the result."""
        report: dict[str, Any] = {}
        self._client.do({"do": "follow", "config": self.config})
        try:
            yield report
        finally:
            self._client.ask({})
            report.update(self._client.answer())
