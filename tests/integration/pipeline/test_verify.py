"""`penstock verify`: beside a running pipeline under writes, and on a stopped one.

How often and how much is a matter of patience: PENSTOCK_TEST_VERIFY_ROUNDS and PENSTOCK_TEST_VERIFY_ROWS. `make test-verify` sets both
high.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from penstock.errors import NoTablesError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.scratch import scratch_directory
from penstock.pipeline.states import TableState
from penstock.pipeline.verdicts import TableVerdict, VerifyReport
from penstock.pipeline.verify import verify_tables
from penstock.position import Position
from penstock.schema import TableName
from penstock.testing.shop import ShopWorkload, create_shop
from tests.fix_pipeline import Mirror, MirrorFactory, mirror_document
from tests.fix_postgres import Database, PostgresServer
from tests.waiting import wait_for

ROUNDS = int(os.environ.get("PENSTOCK_TEST_VERIFY_ROUNDS", "2"))
ROWS = int(os.environ.get("PENSTOCK_TEST_VERIFY_ROWS", "30000"))
_SECONDS = 180.0


@contextmanager
def _running(pipeline: Pipeline) -> Iterator[None]:
    """The pipeline in a thread of its own, from its first epoch on."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            pipeline.run()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="test-pipeline")
    thread.start()
    try:
        wait_for(lambda: pipeline.position > Position.ZERO or errors, "the first epoch", lambda: errors, _SECONDS)
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
        """Of two epochs: one may have been planned long ago."""
        for _ in range(2):
            reached = self.pipeline.position
            wait_for(lambda reached=reached: self.pipeline.position > reached, "an epoch", lambda: self.pipeline.position, _SECONDS)  # type: ignore[misc]


@pytest.fixture(scope="module")
def busy(spark: SparkSession, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
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


def _verdict(report: VerifyReport, table: str) -> TableVerdict:
    return next(each for each in report.verdicts if str(each.table) == table)


@pytest.mark.timeout(7200)
def test_verify_beside_a_running_pipeline_under_writes_gives_no_false_alarm(busy: Busy) -> None:
    """Each time at another position, at which an epoch ended that the pipeline would not have ended there by itself."""
    positions = set()
    for _ in range(ROUNDS):
        before = busy.workload.changes
        report = verify_tables(busy.spark, busy.config)
        assert report.equal, _explained(report)
        assert [str(each.table) for each in report.verdicts] == ["shop.orders"]
        positions |= {each.position for each in report.verdicts}
        assert all(each.comparison is not None and each.comparison.source_rows > 0 for each in report.verdicts)
        assert busy.workload.changes > before, "nothing was written meanwhile"
    assert len(positions) == ROUNDS
    assert not list(busy.config.barriers.glob("*"))
    busy.wait_for_progress()


def test_the_pipeline_goes_on_while_a_snapshot_waits_for_an_open_transaction(busy: Busy) -> None:
    reports: list[VerifyReport] = []
    told: list[str] = []
    thread = threading.Thread(target=lambda: reports.append(verify_tables(busy.spark, busy.config, tell=told.append)))
    with busy.database.connect() as held:
        held.execute("INSERT INTO shop.orders (customer_id, status) VALUES (1, 'late')")
        thread.start()
        wait_for(lambda: any("waits for" in text for text in told), "a snapshot that waits", lambda: told, _SECONDS)
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
from penstock.postgres.exported import export_snapshot
from penstock.spool.barriers import BarrierRequest

with BarrierRequest(Path(sys.argv[2]), Position.ZERO):
    with export_snapshot(SourceAddress.parse(sys.argv[1])):
        pass
"""


def test_a_verify_that_is_killed_leaves_the_pipeline_going(busy: Busy) -> None:
    """At the worst moment: it has announced that an epoch is to end somewhere, and never says where."""
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


def test_a_stopped_pipeline_is_brought_to_the_snapshot_and_every_difference_is_found(
    database: Database, mirror: MirrorFactory, spark: SparkSession
) -> None:
    database.execute("CREATE TABLE big (id int PRIMARY KEY, v text, f float8, n numeric, m text[])")
    database.execute(f"INSERT INTO big SELECT g, 'v' || g, g / 7.0, g, ARRAY[g::text, NULL] FROM generate_series(1, {ROWS}) g")
    database.execute("INSERT INTO big VALUES (-1, '', 'NaN', 'NaN', '{}'), (-2, NULL, '-0', 'Infinity', NULL)")
    database.execute("CREATE TABLE other (id int PRIMARY KEY)")
    both = mirror()
    both.run_once()
    database.execute("UPDATE big SET v = 'changed' WHERE id <= 100; DELETE FROM big WHERE id = 200; INSERT INTO other VALUES (1)")
    report = verify_tables(spark, both.config)
    assert report.equal, _explained(report)
    assert [each.comparison and each.comparison.source_rows for each in report.verdicts] == [ROWS + 1, 1]
    _alter(spark, both.config.sink.delta.path / "public" / "big")
    started = time.monotonic()
    report = verify_tables(spark, both.config, [TableName("public", "big")])
    print(f"verified {ROWS:,} rows in {time.monotonic() - started:.1f} s")
    assert [str(each.table) for each in report.verdicts] == ["public.big"]
    assert not report.equal
    assert _differences(report) == [
        ("different", {"id": "-2"}, [("f", "-0.0", "0.0"), ("_exact", '{"n":"Infinity"}', '{"n":"-Infinity"}')]),
        ("different", {"id": "303"}, [("m", '["303",null]', '[null,"303"]')]),
        ("different", {"id": str(ROWS)}, [("v", f"v{ROWS}", "altered")]),
        ("extra", {"id": "-5"}, []),
        ("extra", {"id": "301"}, []),
        ("missing", {"id": "300"}, []),
    ]
    with pytest.raises(NoTablesError, match=r"does not select public\.none"):
        verify_tables(spark, mirror(tables=["public.big"]).config, [TableName("public", "none")])


def _alter(spark: SparkSession, path: Path) -> None:
    """Behind the pipeline's back, in one commit: a row goes, one doubles, one comes, and values change in three."""
    rows = spark.read.format("delta").load(str(path)).where("id <> 300")
    added = rows.where("id IN (301, 302)").withColumn("id", F.expr("if(id = 302, -5, id)"))
    altered = {
        "v": f"if(id = {ROWS}, 'altered', v)",
        "f": "if(id = -2, 0D, f)",
        "m": "if(id = 303, array(NULL, '303'), m)",
        "_exact": "if(id = -2, map('n', '-Infinity'), _exact)",
    }
    changed = rows.withColumns({name: F.expr(text) for name, text in altered.items()})
    changed.unionAll(added).write.format("delta").mode("overwrite").save(str(path))


def _differences(report: VerifyReport) -> list[tuple[str, dict[str, str | None], list[tuple[str, str | None, str | None]]]]:
    compared = [each.comparison for each in report.verdicts if each.comparison is not None]
    return [
        (row.kind, row.key, [(each.column, each.source, each.target) for each in row.columns])
        for found in compared
        for row in found.examples
    ]


def test_a_table_that_failed_is_told_and_is_not_equal(database: Database, mirror: MirrorFactory, spark: SparkSession) -> None:
    database.execute("CREATE TABLE good (id int PRIMARY KEY, v text); CREATE TABLE bad (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO good VALUES (1, 'one'); INSERT INTO bad VALUES (1, 'one')")
    both = mirror()
    both.run_once()
    database.execute("ALTER TABLE bad ADD more int; INSERT INTO bad VALUES (2, 'two', 2); INSERT INTO good VALUES (2, 'two')")
    report = verify_tables(spark, both.config)
    assert not report.equal
    good, bad = _verdict(report, "public.good"), _verdict(report, "public.bad")
    assert good.equal
    assert (bad.state, bad.comparison, bad.equal) == (TableState.FAILED, None, False)
    assert bad.reason is not None
    assert "PEN-1403" in bad.reason
    assert bad.remedy
    assert verify_tables(spark, both.config, [TableName("public", "good")]).equal


def test_what_a_killed_verify_left_on_disk_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "lock").touch()
    (tmp_path / "dead" / "rows.parquet").touch()
    with scratch_directory(tmp_path) as one:
        assert not (tmp_path / "dead").exists()
        with scratch_directory(tmp_path) as other:
            assert one.is_dir()
            assert other.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
