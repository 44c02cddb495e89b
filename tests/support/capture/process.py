"""`penstock capture` as a process, its configuration and its status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from penstock.config.model import PipelineConfig, load_config
from penstock.position import Position
from penstock.spool.reader import SpoolReader
from penstock.spool.status import load_status
from tests.support.fix_pipeline import Mirror
from tests.support.fix_postgres import Database
from tests.support.waiting import DEADLINE_SECONDS, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SOURCES = Path(__file__).parents[3] / "src"


class CaptureProcess:
    """One process of `penstock capture`. Its output is stored."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self.log = config.with_suffix(".log")
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.main", "capture", str(config)],
                env={**os.environ, "PYTHONPATH": str(_SOURCES)},
                stdout=output,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_it_runs(self) -> CaptureProcess:
        """Wait until it streams: publication and slot exist, and every later commit is captured."""
        spool = load_config(self._config).spool

        def is_over() -> bool:
            status = load_status(spool)
            return self._process.poll() is not None or (
                status is not None and (status.pid, status.state) == (self.pid, "streaming")
            )

        wait_for(is_over, "a capture that runs", self.log.read_text)
        assert self._process.poll() is None, self.log.read_text()
        return self

    def wait(self) -> int:
        return self._process.wait(timeout=DEADLINE_SECONDS)

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=DEADLINE_SECONDS)


class SharedSlot:
    """One slot, one publication and one spool, for as many configurations as a test needs."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.database = database
        self._directory = directory
        self.slot = database.name
        self._processes: list[CaptureProcess] = []

    def document(self, pipeline: str, tables: list[str], **source: Any) -> dict[str, Any]:
        shared = {"slot": self.slot, "publication": self.slot, "spool": "spool", "process": "separate"}
        return {
            "pipeline": pipeline,
            "source": {"dsn": self.database.dsn, **shared, **source},
            "tables": tables,
            "sink": {"delta": {"path": f"lake_{pipeline}"}},
            "state": f"state_{pipeline}",
            "trigger": "100 ms",
        }

    def config(
        self, pipeline: str, tables: list[str], types: dict[str, str] | None = None, **source: Any
    ) -> Path:
        path = self._directory / f"{pipeline}.yaml"
        document = {**self.document(pipeline, tables, **source), "types": types or {}}
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    @property
    def spool(self) -> Path:
        return self._directory / "spool"

    def start(self, config: Path) -> CaptureProcess:
        self._processes.append(CaptureProcess(config))
        return self._processes[-1]

    def load(self, config: Path) -> PipelineConfig:
        return load_config(config)

    def mirror(self, session: SparkSession, pipeline: str, tables: list[str], **changes: Any) -> Mirror:
        """A pipeline that reads behind the capture, with its own state and lake."""
        directory = self._directory / pipeline
        directory.mkdir()
        document = self.document(pipeline, tables, spool=str(self.spool))
        return Mirror(session, self.database, directory, {**document, **changes})

    @property
    def confirmed(self) -> Position:
        rows = self.database.query(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.slot
        )
        return Position.parse(rows[0][0])

    def execute(self, statement: str) -> Position:
        """Everything committed here is at or before the returned position."""
        self.database.execute(statement)
        return self.position

    @property
    def position(self) -> Position:
        return Position.parse(self.database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])

    def wait_for_spool(self, position: Position) -> Position:
        reader = SpoolReader(self.spool)
        wait_for(
            lambda: (reader.end or Position.ZERO) >= position,
            f"a spool that reaches {position}",
            lambda: reader.end,
        )
        assert reader.end is not None
        return reader.end

    def close(self) -> None:
        for process in self._processes:
            process.kill()
