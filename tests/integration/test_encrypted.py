"""The replication stream over TLS, where the server sends a record per row and libpq reads one record at a
time.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import psycopg
import pytest

from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.replication import ReplicationStream, StreamRequest
from penstock.testing.embedded import EmbeddedPostgres
from tests.support.fix_postgres import server_directory
from tests.support.waiting import DEADLINE_SECONDS

VERSION = 17
"""The bundled 16 and 18 are built without TLS."""

ROWS = 30_000
"""Some hundred times the normal duration; reading one record at a wait would take twice as long."""


@pytest.fixture
def dsn() -> Iterator[str]:
    with server_directory() as directory:
        data = directory / "data"
        with EmbeddedPostgres(data, VERSION, fsync=False):
            pass
        request = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
        ]
        subprocess.run(
            [*request, "-keyout", "server.key", "-out", "server.crt"],
            cwd=data,
            check=True,
            capture_output=True,
        )
        owner = data.stat()
        for name in ("server.key", "server.crt"):
            (data / name).chmod(0o600)
            os.chown(data / name, owner.st_uid, owner.st_gid)
        with EmbeddedPostgres(data, VERSION, {"ssl": "on"}, fsync=False) as server:
            yield f"{server.dsn()}?sslmode=require"


def test_C03_a_stream_over_tls_is_read_in_gulps_too(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("CREATE TABLE t (id int PRIMARY KEY, note text); CREATE PUBLICATION p FOR TABLE t")
        admin.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        admin.execute("INSERT INTO t SELECT g, repeat('x', 40) FROM generate_series(1, %s) g", [ROWS])
    stream = ReplicationStream(SourceAddress.parse(dsn), StreamRequest("s", "p", Position.ZERO))
    stream.open()
    stream.start()
    received = 0
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while received < ROWS and time.monotonic() < deadline:
            received += len(stream.take(0.2))
    finally:
        stream.close()
    assert received >= ROWS
