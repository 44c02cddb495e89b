"""Files that version 7047cc4 wrote are continued by this version: targets, spool, state, positions of
records, checkpoints of connectors.

The archive holds the package of that commit without its `testing`, and is reproducible:

    git archive --format=tar 7047cc4 src/penstock src/pyspark_penstock.py ':!src/penstock/testing' | xz -9e

7047cc4 is the last commit before modules and classes were renamed. A test fails if a name that was persisted
then has changed since: a JSON key, a file or directory, a table property, a column.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock import PostgresConnector, PostgresRecordSource, RecordPosition, SourceCheckpoint
from penstock.cli.table_commands import order, order_replay
from penstock.contracts.connector import SourceBatch
from penstock.errors import RecordGoneError
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.status import inspect_status
from penstock.pipeline.table_states import TableState
from penstock.pipeline.verify.verify import verify_tables
from penstock.schema import TableName
from penstock.testing.streams import wait_for
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database

ARCHIVE = Path(__file__).parents[2] / "data" / "penstock-7047cc4.tar.xz"
TIMEOUT_SECONDS = 240

QUICK_JVM = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"}
"""For a JVM that lives for one run."""

DATED, HALTED, ITEMS, VERSIONS = (
    TableName("public", name) for name in ("dated", "halted", "items", "versions")
)


class FormerVersion:
    """Runs commands and programs with the package of the archive, each in a separate process."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def penstock(self, *arguments: object) -> str:
        return self._run(["-m", "penstock.cli.main", *map(str, arguments)])

    def program(self, text: str, *arguments: object) -> Any:
        """Run a program that prints one JSON document."""
        return json.loads(self._run(["-c", text, *map(str, arguments)]))

    def _run(self, arguments: Sequence[str]) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self._source)}
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> FormerVersion:
    directory = tmp_path_factory.mktemp("former")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    version = FormerVersion(directory / "src")
    found = version.program("import json, penstock.pipeline as package; print(json.dumps(package.__file__))")
    assert Path(found).is_relative_to(directory), "another version was imported"
    return version


class Copies(PipelineObserver):
    """Collects the tables that a run copies, and the notices that announce a resync."""

    def __init__(self) -> None:
        self.planned: list[TableName] = []
        self.notices: list[str] = []

    @override
    def snapshot_planned(self, table: TableName, chunks: int, heap_bytes: int) -> None:
        self.planned.append(table)

    @override
    def interrupted(self, reason: str, pause_seconds: float) -> None:
        self.notices.append(reason)


def run_without_copying(mirror: Mirror) -> dict[str, TableState]:
    copies = Copies()
    result = mirror.run_once(copies)
    assert not result.failed
    assert (copies.planned, copies.notices) == ([], [])
    return {name: status.state for name, status in result.tables.items()}


def delta_table_ids(root: Path) -> dict[str, str]:
    """A table that is replaced by a resync gets another id."""
    return {path.name: str(DeltaTable(path).metadata().id) for path in sorted((root / "public").iterdir())}


@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_pipeline_of_the_former_version_continues_without_a_resync(
    spark: SparkSession, database: Database, mirror_into: MirrorFactory, former: FormerVersion, kind: str
) -> None:
    database.execute(
        "CREATE TABLE items (id int PRIMARY KEY, note text); "
        "INSERT INTO items VALUES (1, 'a'), (2, 'b'), (3, 'c')"
    )
    database.execute(
        "CREATE TABLE versions (id int PRIMARY KEY, v text); INSERT INTO versions VALUES (1, 'first')"
    )
    database.execute(
        "CREATE TABLE halted (id int PRIMARY KEY, v text); INSERT INTO halted VALUES (1, 'first')"
    )
    database.execute(
        "CREATE TABLE dated (id int PRIMARY KEY, due date); INSERT INTO dated VALUES (1, '2024-01-01')"
    )
    mirror = mirror_into(
        kind,
        tables=["public.*", {"table": "public.versions", "mode": "history"}],
        types={"on_unrepresentable": "error"},
        refused="dead_letters",
        spark={"master": "local[2]", "conf": QUICK_JVM},
    )

    former.penstock("run", "--once", mirror.path)
    former.penstock("tables", "pause", mirror.path, "public.halted")
    database.execute("ALTER TABLE items ADD COLUMN size int DEFAULT 7; INSERT INTO items VALUES (4, 'd', 8)")
    database.execute(
        "UPDATE versions SET v = 'second'; UPDATE halted SET v = 'second'; "
        "INSERT INTO dated VALUES (2, 'infinity')"
    )
    former.penstock("run", "--once", mirror.path)
    former_ids = delta_table_ids(mirror.config.sink.root) if kind == "delta" else {}

    before = inspect_status(mirror.config)
    assert before.letters == {DATED: 1}
    assert mirror.orders().paused == {HALTED}
    assert before.spool_segments > 0, "the paused table has changes to read"
    assert before.epoch is not None

    database.execute("ALTER TABLE items ADD COLUMN colour text; INSERT INTO items VALUES (5, 'e', 9, 'red')")
    database.execute(
        "UPDATE items SET note = 'z' WHERE id = 1; DELETE FROM items WHERE id = 2; "
        "UPDATE versions SET v = 'third'"
    )
    states = run_without_copying(mirror)
    assert states == {
        **dict.fromkeys(map(str, (DATED, ITEMS, VERSIONS)), TableState.STREAMING),
        str(HALTED): TableState.PAUSED,
    }
    after = inspect_status(mirror.config)
    assert after.letters == {DATED: 1}
    assert mirror.orders().paused == {HALTED}
    assert after.epoch is not None
    assert after.epoch.number > before.epoch.number
    assert [row["v"] for row in mirror.rows("public.halted")] == ["first"]

    order(mirror.path, ["public.halted"], "resume")
    mirror.path.write_text(
        mirror.path.read_text(encoding="utf-8").replace(
            "on_unrepresentable: error", "on_unrepresentable: 'null'"
        )
    )
    order_replay(mirror.path, ["public.dated"])
    states = run_without_copying(mirror)
    assert set(states.values()) == {TableState.STREAMING}
    assert inspect_status(mirror.config).letters == {}
    assert sorted(row["v"] for row in mirror.rows("public.versions")) == ["first", "second", "third"]
    report = verify_tables(spark, mirror.config)
    assert report.equal, report
    mirror.assert_equal(*map(str, (DATED, HALTED, ITEMS, VERSIONS)))
    if kind == "delta":
        assert delta_table_ids(mirror.config.sink.root) == former_ids


READ_RECORDS = """
import json, sys
from penstock import PostgresRecordSource, RecordPosition
source = PostgresRecordSource()
source.open(json.loads(sys.argv[1]))
position, keys = None, []
for _ in range(int(sys.argv[2])):
    record = source.read(position)
    position = record.position
    keys.append(record.key["id"])
source.ack(position)
source.teardown()
print(json.dumps([str(position), keys]))
"""


def test_records_continue_after_a_position_of_the_former_version(
    database: Database, former: FormerVersion, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE items (id int PRIMARY KEY, note text); INSERT INTO items VALUES (1, 'a'), (2, 'b')"
    )
    config = {
        "url": database.dsn,
        "table": "public.items",
        "slot": f"r_{database.name}",
        "spool": str(tmp_path / "spool"),
    }
    older, keys = former.program(READ_RECORDS, json.dumps(config), 2)
    assert sorted(keys) == [1, 2]
    database.execute("INSERT INTO items VALUES (3, 'c')")
    database.execute("INSERT INTO items VALUES (4, 'd')")
    position, keys = former.program(
        READ_RECORDS.replace("None, []", "RecordPosition(sys.argv[3]), []"), json.dumps(config), 1, older
    )
    assert keys == [3]
    source = PostgresRecordSource()
    source.open({**config, "waitSeconds": "60"})
    try:
        with pytest.raises(RecordGoneError):
            source.read(RecordPosition(older))
        record = source.read(RecordPosition(position))
        assert (record.key, record.operation) == ({"id": 4}, "upsert")
        source.ack(record.position)
    finally:
        source.teardown()


READ_BATCHES = """
import json, sys
from penstock import PostgresConnector
connector = PostgresConnector()
connector.open(json.loads(sys.argv[1]))
rows = []
while len(rows) < 2:
    connector.data_ready().wait(60)
    batch = connector.poll_batch(100)
    found = [] if batch is None else batch.records.to_pylist()
    rows += [row["id"] for row in found if row["_change_type"] == "snapshot"]
while connector.poll_batch(100) is not None:
    pass
checkpoint = connector.checkpoint()
connector.notify_epoch_committed(checkpoint.epoch)
connector.close()
print(json.dumps([checkpoint.to_json(), rows]))
"""


def test_a_connector_continues_after_a_checkpoint_of_the_former_version(
    database: Database, former: FormerVersion, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE items (id int PRIMARY KEY, note text); INSERT INTO items VALUES (1, 'a'), (2, 'b')"
    )
    config = {
        "dsn": database.dsn,
        "slot": f"c_{database.name}",
        "spool": str(tmp_path / "spool"),
        "tables": "public.items",
    }
    checkpoint, rows = former.program(READ_BATCHES, json.dumps(config))
    assert sorted(rows) == [1, 2]
    database.execute("INSERT INTO items VALUES (3, 'c')")
    connector = PostgresConnector()
    connector.open(config)
    try:
        connector.restore(SourceCheckpoint.from_json(checkpoint))
        batches: list[SourceBatch] = []

        def has_batch() -> bool:
            found = connector.poll_batch(100)
            batches.extend([] if found is None else [found])
            return bool(batches)

        wait_for(has_batch, "the change after the checkpoint", connector.health_check, 60)
        changes = batches[0].records.to_pylist()
        assert [(row["_change_type"], row["id"]) for row in changes] == [("insert", 3)]
    finally:
        connector.close()
