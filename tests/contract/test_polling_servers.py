"""Server behaviour that polling relies on: crashes and transaction ID wraparound."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from penstock.testing.capture_conformance import upsert
from penstock.testing.embedded import EmbeddedPostgres
from penstock.testing.streams import check_same_set, take
from tests.support.contract.polling_harness import PollingHarness, idle
from tests.support.fix_postgres import Database, server_directory

_SETTINGS = {
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "wal_writer_delay": "10s",  # so that only flushed WAL reaches the disk
    "bgwriter_delay": "10s",
    "autovacuum": "off",
}
_SEGMENT_TRANSACTIONS = 32 * 8_192 * 4
"""The number of transactions whose states are in one file of pg_xact."""


@pytest.fixture(scope="module")
def server(postgres_version: int) -> Iterator[EmbeddedPostgres]:
    """Without logical replication, which polling does not need."""
    with server_directory() as directory:
        server = EmbeddedPostgres(directory / "data", postgres_version, _SETTINGS, fsync=False)
        try:
            server.start()
            yield server
        finally:
            server.stop("immediate")


@pytest.fixture
def polled(server: EmbeddedPostgres, tmp_path: Path) -> Iterator[PollingHarness]:
    database = Database("postgres", server.dsn())
    with idle(PollingHarness(database, tmp_path)) as harness:
        yield harness
    database.close()


def test_commit_that_a_crash_would_undo_is_on_disk_before_it_is_given_out(
    server: EmbeddedPostgres, polled: PollingHarness
) -> None:
    """The next transactions would get the ids of the lost ones, and their rows would be taken for
    known ones.
    """
    with closing(polled.capture().live()) as stream:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("SET synchronous_commit = off")
            connection.execute(f"INSERT INTO {polled.table} VALUES (1, 'asynchronous')".encode())
            for change in take(stream, 1, polled.deadline_seconds):
                change.ack.confirm()
            polled.database.close()
            server.restart("immediate")
        assert polled.database.query(f"SELECT id FROM {polled.table}") == [(1,)], "given out, and then undone"
        polled.commit(upsert(polled.table, 2, "after"))
        check_same_set(
            take(stream, 1, polled.deadline_seconds),
            [upsert(polled.table, 2, "after")],
            "the capture goes on by itself",
        )


def test_rows_are_distinguished_from_frozen_ones_after_transaction_id_wraparound(
    server: EmbeddedPostgres, polled: PollingHarness
) -> None:
    """A frozen row keeps its transaction ID, which looks like a later one after two thousand million
    transactions.
    """
    polled.database.execute(f"INSERT INTO {polled.table} SELECT n, 'old' FROM generate_series(1, 1200) n")
    polled.capture().live().close()
    for number, upto in enumerate((2_140_000_000, 4_280_000_000, (1 << 32) - 8), 2001):
        jump(server, polled.database, upto)
        with closing(polled.capture().live()) as stream:
            for each in range(10):
                polled.database.execute(f"INSERT INTO {polled.table} VALUES ({number}{each}, 'new')")
                polled.await_look()
            expected = [upsert(polled.table, number * 10 + each, "new") for each in range(10)]
            found = take(stream, 10, polled.deadline_seconds)
            check_same_set(found, expected, f"only the changes at {upto:,}, and nothing else")
            for change in found:
                change.ack.confirm()
    ((reached,),) = polled.database.query("SELECT pg_current_xact_id()::text::bigint")
    assert reached > 1 << 32, "or nothing was tried"


def jump(server: EmbeddedPostgres, database: Database, number: int) -> None:
    """Freeze everything, and set the next transaction ID to `number`."""
    for name in ("template0", "template1", "postgres"):
        database.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        with psycopg.connect(server.dsn(name), autocommit=True) as connection:
            connection.execute("VACUUM (FREEZE)")
    database.close()
    server.stop()
    states = server.data_dir / "pg_xact" / f"{number // _SEGMENT_TRANSACTIONS:04X}"
    states.write_bytes(bytes(_SEGMENT_TRANSACTIONS // 4))
    states.chmod(0o600)
    owner = (server.data_dir / "PG_VERSION").stat()
    os.chown(states, owner.st_uid, owner.st_gid)
    reset = [str(server.bin("pg_resetwal")), "-x", str(number), "-D", str(server.data_dir)]
    if os.geteuid() == 0:  # these programs refuse to run as root
        reset = ["setpriv", f"--reuid={owner.st_uid}", f"--regid={owner.st_gid}", "--clear-groups", *reset]
    done = subprocess.run(reset, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    server.start()
