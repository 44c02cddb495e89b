"""`penstock verify` beside a running pipeline, while the source is being written to.

PENSTOCK_TEST_VERIFY_ROUNDS sets the number of rounds. `make test-verify` sets it high.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from pyspark.sql import SparkSession

from penstock.config.model import PipelineConfig
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.verify.verify import VerifyReport, verify_tables
from penstock.position import Position
from penstock.testing.shop import ShopWorkload, create_shop
from tests.support.fix_pipeline import Mirror, mirror_document
from tests.support.fix_postgres import Database, PostgresServer
from tests.support.waiting import wait_for

ROUNDS = int(os.environ.get("PENSTOCK_TEST_VERIFY_ROUNDS", "2"))
_SECONDS = 180.0


@contextmanager
def _running(pipeline: Pipeline) -> Iterator[None]:
    """The pipeline in its own thread, after its first epoch."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            pipeline.run()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="test-pipeline")
    thread.start()
    try:
        wait_for(
            lambda: pipeline.position > Position.ZERO or errors, "the first epoch", lambda: errors, _SECONDS
        )
        yield
    finally:
        pipeline.stop()
        thread.join()
    assert not errors, errors


@dataclass(frozen=True)
class Busy:
    """A pipeline that runs, and a shop that is being written to."""

    spark: SparkSession
    database: Database
    config: PipelineConfig
    pipeline: Pipeline
    workload: ShopWorkload

    def wait_for_progress(self) -> None:
        """Wait for two epochs, because the first may have been planned earlier."""
        for _ in range(2):
            reached = self.pipeline.position
            wait_for(
                lambda reached=reached: self.pipeline.position > reached,  # type: ignore[misc]
                "an epoch",
                lambda: self.pipeline.position,
                _SECONDS,
            )


@pytest.fixture(scope="module")
def busy(
    spark: SparkSession, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Busy]:
    database = postgres_server.create_database()
    create_shop(database.dsn, customers=50, orders=300)
    document = mirror_document(database, tables=["shop.orders"], trigger="1 second")
    shop = Mirror(spark, database, tmp_path_factory.mktemp("busy"), document)
    pipeline = shop.pipeline()
    with _running(pipeline), ShopWorkload(database.dsn, seed=ROUNDS, pause_seconds=0.1) as workload:
        yield Busy(spark, database, shop.config, pipeline, workload)
    database.close()
    postgres_server.drop_database(database.name)


def _explained(report: VerifyReport) -> str:
    return json.dumps(report.as_document(), indent=1)


@pytest.mark.timeout(600 + 120 * ROUNDS)
def test_verify_beside_a_running_pipeline_under_writes_gives_no_false_alarm(busy: Busy) -> None:
    """Each comparison is at another position, at which the pipeline would not end an epoch without the
    barrier.
    """
    positions: set[Position] = set()
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if text.startswith("comparing") and len(positions) < 2:
            busy.wait_for_progress()  # so that the target has newer versions when this one is read

    for _ in range(ROUNDS):
        before = busy.workload.changes
        report = verify_tables(busy.spark, busy.config, tell=tell)
        assert report.equal, _explained(report)
        assert [str(each.table) for each in report.verdicts] == ["shop.orders"]
        positions |= {each.position for each in report.verdicts}
        assert all(
            each.comparison is not None and each.comparison.source_rows > 0 for each in report.verdicts
        )
        assert busy.workload.changes > before, "nothing was written during the run"
    assert len(positions) == ROUNDS
    assert not any("trying again" in text for text in told), "the pipeline stepped over a barrier"
    assert not list(busy.config.barriers.glob("*"))
    busy.wait_for_progress()


@pytest.mark.timeout(900)
def test_the_pipeline_continues_while_a_snapshot_waits_for_an_open_transaction(busy: Busy) -> None:
    reports: list[VerifyReport] = []
    told: list[str] = []
    thread = threading.Thread(
        target=lambda: reports.append(verify_tables(busy.spark, busy.config, tell=told.append))
    )
    with busy.database.connect() as held:
        held.execute("INSERT INTO shop.orders (customer_id, status) VALUES (1, 'late')")
        thread.start()
        wait_for(
            lambda: any("waits for" in text for text in told), "a snapshot that waits", lambda: told, _SECONDS
        )
        busy.wait_for_progress()
        assert not reports
        held.commit()
    thread.join()
    assert reports[0].equal, _explained(reports[0])


_ANNOUNCE = """
import sys
from pathlib import Path
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.snapshot_export import export_snapshot
from penstock.spool.barriers import BarrierRequest

with BarrierRequest(Path(sys.argv[2]), Position.ZERO):
    with export_snapshot(SourceAddress.parse(sys.argv[1])):
        pass
"""


@pytest.mark.timeout(900)
def test_a_verify_that_is_killed_leaves_the_pipeline_going(busy: Busy) -> None:
    """At the worst moment: the barrier is announced but never placed."""
    barriers = busy.config.barriers
    with busy.database.connect() as held:
        held.execute("INSERT INTO shop.orders (customer_id, status) VALUES (1, 'never')")
        command = [sys.executable, "-c", _ANNOUNCE, busy.database.dsn, str(barriers)]
        verify = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        wait_for(lambda: any(barriers.glob("*.json")), "an announcement", seconds=_SECONDS)
        verify.send_signal(signal.SIGKILL)
        verify.wait()
        held.rollback()
    assert any(barriers.glob("*.json")), "nothing was left behind, so nothing is tried"
    wait_for(lambda: not list(barriers.glob("*")), "the end of its lease", seconds=_SECONDS)
    busy.wait_for_progress()
