"""The end of a query: released positions are confirmed, and the slot is free for the next query at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.capture.provision import ensure_capture
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.spool.retention import release
from tests.support.fix_postgres import Database
from tests.support.source.stream import ChangeSource

pytestmark = pytest.mark.source

RELEASE_SECONDS = 3.0


def test_stopping_an_idle_query_releases_the_slot(source: ChangeSource) -> None:
    run = source.start()
    source.wait_for_active_slot()
    run.stop()
    source.wait_for_idle_slot(RELEASE_SECONDS)
    assert not source.is_slot_active()


def test_stopping_a_busy_query_releases_the_slot_and_the_spool(source: ChangeSource) -> None:
    run = source.start()
    source.insert(1, 50_000)
    # Stopped before it has written its first offset, Spark would take its own temporary file for a foreign
    # checkpoint.
    run.wait_for((source.checkpoint / "offsets" / "0").exists, "first batch")
    run.stop()
    source.wait_for_idle_slot(RELEASE_SECONDS)
    rest = source.start()
    rest.wait_for(lambda: len({row["id"] for row in run.rows + rest.rows}) == 50_000, "all rows")


def test_failing_query_releases_the_slot(source: ChangeSource) -> None:
    def refuse(number: int) -> None:
        raise ValueError(number)

    run = source.start(refuse)
    source.insert(1, 3)
    run.wait_for_failure()
    source.wait_for_idle_slot(RELEASE_SECONDS)
    assert not source.is_slot_active()


READER = """
import json, select, sys
from penstock.spark.reader import ControlStreamReader
reader = ControlStreamReader(json.loads(sys.argv[1]))
try:
    offset = reader.latestOffset()
    while offset["position"] == "0/0":
        offset = reader.latestOffset()
    print(offset["position"], flush=True)
    # A signal right before a blocking read would be handled only at the end of the input.
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
finally:
    print("stopping", flush=True)
    reader.stop()
"""


@pytest.mark.parametrize("ending", ["signals", "closed input"])
def test_released_position_is_confirmed_although_spark_signals_twice(
    ending: str, database: Database, tmp_path: Path
) -> None:
    """Spark ends the reader's process with SIGTERM, closes its input, and sends SIGTERM again while it is
    ending.
    """
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    address = SourceAddress.parse(database.dsn)
    ensure_capture(address, database.name, database.name, [TableName("public", "orders")])
    database.execute("INSERT INTO orders VALUES (1)")
    spool = tmp_path / "spool"
    options = {
        "dsn": address.dsn,
        "slot": database.name,
        "publication": database.name,
        "spool": str(spool),
        "quietSeconds": "0.1",
    }
    if address.password is not None:
        options["password"] = address.password.reveal()
    with subprocess.Popen(
        [sys.executable, "-c", READER, json.dumps(options)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        released = release(spool, "pipeline", Position.parse(process.stdout.readline().strip()))
        if ending == "signals":
            process.send_signal(signal.SIGTERM)
        else:
            process.stdin.close()
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    rows = database.query(
        "SELECT confirmed_flush_lsn::text, active FROM pg_replication_slots WHERE slot_name = %s",
        database.name,
    )
    assert (Position.parse(rows[0][0]), rows[0][1]) == (released, False)
