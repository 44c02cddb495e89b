"""C03: the password is replaced while the capture runs, as cloud providers do with tokens every few
minutes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from penstock import WalCapture
from penstock.capture.settings import CaptureSettings
from penstock.config.model import load_config
from penstock.errors import AuthenticationError, ConfigError, SecretError
from penstock.postgres.connection import connect
from penstock.secret import FileSecret, Secret
from penstock.testing.embedded import EmbeddedPostgres
from penstock.testing.streams import take
from tests.support.fix_postgres import server_directory

DEADLINE_SECONDS = 60.0


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    with server_directory() as directory, EmbeddedPostgres(directory / "data", 18, fsync=False) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            admin.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
            admin.execute(
                "CREATE ROLE reader LOGIN REPLICATION PASSWORD 'first'; GRANT SELECT ON t TO reader"
            )
            hba = directory / "data" / "pg_hba.conf"
            hba.write_text(
                "host all reader all scram-sha-256\nhost replication reader all "
                f"scram-sha-256\n{hba.read_text()}"
            )
            admin.execute("SELECT pg_reload_conf()")
        yield server


def configured(server: EmbeddedPostgres, directory: Path) -> CaptureSettings:
    """Passed to the capture as options of a stream, as in a run."""
    (directory / "token").write_text("first\n", encoding="utf-8")
    (directory / "pipeline.yaml").write_text(
        f"""
pipeline: rotated
source:
  dsn: postgresql://reader@127.0.0.1:{server.port}/postgres
  password: {{file: token}}
  slot: rotated
  publication: p
  spool: spool
tables: [public.t]
sink: {{parquet: {{path: lake}}}}
""",
        encoding="utf-8",
    )
    options = load_config(directory / "pipeline.yaml").capture_settings().to_options()
    assert "first" not in options.values()
    return CaptureSettings.from_options(options)


def test_C03_a_replaced_password_file_is_read_again_when_the_connection_is_lost(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    settings = configured(server, tmp_path)
    with (
        psycopg.connect(server.dsn(), autocommit=True) as admin,
        closing(WalCapture(settings).live()) as stream,
    ):
        admin.execute("INSERT INTO t VALUES (1)")
        take(stream, 1, DEADLINE_SECONDS)
        admin.execute("ALTER ROLE reader PASSWORD 'second'")
        (tmp_path / "token").write_text("second\n", encoding="utf-8")
        ended = admin.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'reader'"
        ).fetchone()
        assert ended is not None
        assert ended[0] >= 1
        admin.execute("INSERT INTO t VALUES (2)")
        take(stream, 1, DEADLINE_SECONDS)
        admin.execute("ALTER ROLE reader PASSWORD 'third'")
    with pytest.raises(AuthenticationError), connect(settings.address):
        pass


def test_C03_remote_tasks_get_the_current_password_and_its_text_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    secret = FileSecret.at(path)
    with pytest.raises(SecretError, match="token"):
        secret.reveal()
    path.write_text("first\n", encoding="utf-8")
    assert pickle.loads(pickle.dumps(secret)) == Secret("first")
    path.write_text("second\n", encoding="utf-8")
    assert secret.reveal() == "second"
    assert "second" not in f"{secret} {secret!r}"
    options = {"dsn": "host=h", "slot": "s", "spool": "spool", "password": "x", "passwordFile": str(path)}
    with pytest.raises(ConfigError, match="both given"):
        CaptureSettings.from_options(options)
