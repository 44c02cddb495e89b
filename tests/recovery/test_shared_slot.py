"""Two pipelines behind one capture: in whatever order processes are killed and restarted, both end equal to
the source.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from typing_extensions import override

from penstock.pipeline.epoch_log import EpochLog
from penstock.pipeline.observer import PipelineObserver
from penstock.position import Position
from penstock.spark.session import SHORT_LIVED
from penstock.spool.retention import inspect_consumers
from tests.support.capture.process import SharedSlot
from tests.support.fix_pipeline import Mirror
from tests.support.fix_postgres import Database
from tests.support.recovery.writing import Writing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PHASE_SECONDS = 300.0
SMALL = {
    "master": "local[1]",
    "conf": {**SHORT_LIVED, "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "1"},
}
ONE = ["public.a", "public.c"]
TWO = ["public.b", "public.c"]


@pytest.fixture
def shared(database: Database, tmp_path: Path) -> Iterator[SharedSlot]:
    made = SharedSlot(database, tmp_path)
    yield made
    made.close()


class Inserting(Writing):
    """Inserts into three tables, one transaction at a time. They are appended: none may be repeated."""

    @override
    def transact(self, connection: psycopg.Connection) -> None:
        with connection.transaction():
            for table in ("a", "b", "c"):
                connection.execute(f"INSERT INTO {table} VALUES (%s, 'new')", [self.transactions + 1])


class Waiting(PipelineObserver):
    """Records the reasons for which a run waited."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.has_waited = threading.Event()

    def announced(self, message: str) -> None:
        self.reasons.append(message)
        self.has_waited.set()

    def interrupted(self, reason: str, pause_seconds: float) -> None:
        self.reasons.append(reason)
        self.has_waited.set()


@pytest.mark.timeout(1200)
def test_two_pipelines_on_one_slot_equal_the_source_after_any_kills(
    shared: SharedSlot, database: Database, spark: SparkSession
) -> None:
    for table in ("a", "b", "c"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
        database.execute(f"INSERT INTO {table} SELECT -g, 'old' FROM generate_series(1, 200) g")
    one = shared.mirror(spark, "one", ONE, spark=SMALL)
    two = shared.mirror(spark, "two", TWO, spark=SMALL)
    capture = shared.start(one.path)
    with Inserting(database) as writing, _running(one) as first, _running(two) as second:
        for each in (one, two):
            _wait_beyond(each, Position.ZERO)
        capture.kill()
        _kill(first)
        away = shared.position
        capture = shared.start(two.path)
        _wait_beyond(two, away)
        assert shared.confirmed <= _position(one) < away, (
            "changes that the stopped pipeline has not applied are kept"
        )
        capture.kill()
        _kill(second)
    assert writing.transactions > 20
    assert {each.name for each in inspect_consumers(shared.spool)} == {"one", "two"}
    waiting = Waiting()
    back = threading.Thread(target=one.run_once, args=[waiting], name="one")
    back.start()
    assert waiting.has_waited.wait(PHASE_SECONDS)
    assert "is not running: start `penstock capture`" in waiting.reasons[0]
    capture = shared.start(one.path)
    back.join()
    two.run_once()
    one.assert_equal(*ONE)
    two.assert_equal(*TWO)
    assert capture.stop() == 0
    assert shared.confirmed == min(_position(one), _position(two))


def _position(mirror: Mirror) -> Position:
    last = EpochLog(mirror.config.sink.root, mirror.config.pipeline).last()
    return last.position if last is not None else Position.ZERO


def _wait_beyond(mirror: Mirror, position: Position) -> None:
    log = mirror.path.with_name("run.log")
    deadline = time.monotonic() + PHASE_SECONDS
    while _position(mirror) <= position:
        assert time.monotonic() < deadline, (
            f"not beyond {position} in {PHASE_SECONDS} s:\n{log.read_text()[-3000:]}"
        )
        time.sleep(0.1)


@contextmanager
def _running(mirror: Mirror) -> Iterator[subprocess.Popen[bytes]]:
    with mirror.path.with_name("run.log").open("wb") as output:
        command = [sys.executable, "-m", "penstock.cli.main", "run", str(mirror.path)]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The driver and its whole session: JVM and Python workers with it."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
