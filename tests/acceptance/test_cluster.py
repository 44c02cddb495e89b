"""A pipeline on a standalone Spark cluster, started by spark-submit: executors read snapshot chunks and spool
segments.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.pipeline.epoch_log import EpochLog
from penstock.position import Position
from penstock.sinks.delta.epoch import write_epoch
from penstock.spark.java import spark_minor
from tests.support.acceptance.cluster import Cluster, Readers, driver_process, processes_of, task_executors
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.waiting import wait_for

RUN_SECONDS = 240.0
ROWS = 8_000
LOOK_SECONDS = 0.2
NOTED = """
CREATE SCHEMA noted;
CREATE TABLE noted.chunk_readers (port int);
CREATE FUNCTION noted.login() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT application_name LIKE 'penstock snapshot%' AND backend_type = 'client backend'
        FROM pg_stat_activity WHERE pid = pg_backend_pid()) THEN
        PERFORM pg_sleep(0.6);
        INSERT INTO noted.chunk_readers VALUES (inet_client_port());
    END IF;
END $$;
CREATE EVENT TRIGGER noted_login ON login EXECUTE FUNCTION noted.login();
"""
"""The server keeps the client port of every connection that reads a chunk, and delays it so that its process
can be observed.
"""
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "running-on-a-cluster.md"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    directory = tmp_path / "cluster"
    directory.mkdir()
    made = Cluster(directory)
    yield made
    made.close()


class Watch:
    """Repeatedly records which executor and driver processes hold connections to the server, by client
    port.
    """

    def __init__(self, readers: Readers, cluster: Cluster, driver: int) -> None:
        self._readers = readers
        self._cluster = cluster
        self._driver = driver
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            self._readers.look("executor", self._cluster.executor_processes())
            self._readers.look("driver", processes_of(self._driver))


@pytest.mark.versions(18)
@pytest.mark.timeout(900)
def test_executors_and_not_the_driver_read_chunks_and_segments(
    database: Database, mirror: MirrorFactory, cluster: Cluster
) -> None:
    database.execute("CREATE TABLE wide (id int PRIMARY KEY, v text)")
    database.execute(
        "INSERT INTO wide SELECT g, repeat('x', 1000) || g FROM generate_series(1, %s::int) g", ROWS
    )
    wide = mirror(snapshot_chunk_bytes=2 << 20, spark={"conf": cluster.conf})
    database.execute(NOTED)
    readers = Readers(int(str(conninfo_to_dict(database.dsn)["port"])))
    with _submitted(wide, cluster) as process:
        with Watch(readers, cluster, process.pid):
            _wait_beyond(wide, process, Position.ZERO)
        before = Position.parse(database.query("SELECT pg_current_wal_insert_lsn()::text")[0][0])
        database.execute("UPDATE wide SET v = 'changed' WHERE id % 1000 = 0")
        _wait_beyond(wide, process, before)
        driver_process(process.pid).send_signal(signal.SIGTERM)
        assert process.wait(timeout=RUN_SECONDS) == 0, _log(wide)
    wide.assert_equal("public.wide")
    chunk_ports = {row[0] for row in database.query("SELECT port FROM noted.chunk_readers")}
    assert chunk_ports & readers.ports["executor"], (chunk_ports, readers.ports)
    assert not chunk_ports & readers.ports["driver"], (chunk_ports, readers.ports)
    events = cluster.events()
    readers_of_segments = task_executors(events, f"penstock {write_epoch.__name__}")
    assert readers_of_segments
    assert readers_of_segments.keys() <= {"0", "1"}
    executors = {
        event["Task Info"]["Executor ID"] for event in events if event["Event"] == "SparkListenerTaskEnd"
    }
    assert executors == {"0", "1"}, "every task of the run, including chunks"


def _wait_beyond(mirror: Mirror, process: subprocess.Popen[bytes], position: Position) -> None:
    log = EpochLog(mirror.config.sink.root, mirror.config.pipeline)

    def is_beyond() -> bool:
        assert process.poll() is None, _log(mirror)
        last = log.last()
        return (
            last is not None
            and last.position > position
            and all(each.applied for each in last.tables.values())
        )

    wait_for(is_beyond, f"an epoch beyond {position}", lambda: _log(mirror), RUN_SECONDS)


def _log(mirror: Mirror) -> str:
    return mirror.path.with_name("run.log").read_text(encoding="utf-8")[-3000:]


@contextmanager
def _submitted(mirror: Mirror, cluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    """The exact commands of the guide."""
    guide = GUIDE.read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (words,) = re.findall(r"^\$ spark-submit (.*) run\.py run shop\.yaml$", guide, re.MULTILINE)
    run = mirror.path.with_name("run.py")
    run.write_text(program, encoding="utf-8")
    words = words.replace("spark://master.example:7077", cluster.master).replace(
        "delta-spark_4.1", f"delta-spark_{spark_minor()}"
    )
    with mirror.path.with_name("run.log").open("wb") as output:
        process = subprocess.Popen(
            [*cluster.submit, *words.split(), str(run), "run", str(mirror.path)],
            env=cluster.environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)
