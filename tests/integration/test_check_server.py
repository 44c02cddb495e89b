"""`penstock check` against special servers: poor settings, strict authentication, a connection pooler."""

from __future__ import annotations

import json
import os
import select
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from penstock.capture.settings import CaptureSettings
from penstock.capture.wal import WalCapture
from penstock.errors import ServerUnfitError, WalLevelError
from penstock.pipeline.checks.check import check_pipeline
from penstock.pipeline.checks.findings import CheckReport, StepState
from penstock.postgres.connection import SourceAddress
from penstock.postgres.target.state import target_connection
from penstock.schema import TableName
from penstock.testing.embedded import EmbeddedPostgres
from tests.support.fix_postgres import Database, server_directory

PASSWORD = "hunter2-scram"

HBA = """
hostssl   all tls_role     all trust
hostnossl all tls_role     all reject
hostssl   all cert_role    all cert
host      all scram_role   all scram-sha-256
host      all refused_role all reject
host      all all          all trust
"""

VERSION = 17  # the embedded 18 is built without TLS


def _check(directory: Path, source: dict[str, Any]) -> CheckReport:
    document = {
        "pipeline": "strict",
        "source": source,
        "tables": ["public.*"],
        "sink": {"delta": {"path": "lake"}},
    }
    path = directory / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return check_pipeline(path)


def _codes(report: CheckReport) -> set[tuple[str, str]]:
    return {(finding.step, finding.code) for finding in report.problems}


# --- C05: settings ------------------------------------------------------------------------------------------


def test_C05_all_that_a_server_lacks_is_named_at_once(tmp_path: Path) -> None:
    settings = {
        "wal_level": "replica",
        "max_replication_slots": "1",
        "max_wal_senders": "1",
        "wal_sender_timeout": "1s",
        "logical_decoding_work_mem": "64kB",
        "idle_replication_slot_timeout": "60",
    }
    with (
        server_directory() as directory,
        EmbeddedPostgres(directory / "data", 18, settings, fsync=False) as server,
    ):
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            admin.execute("CREATE TABLE t (id int PRIMARY KEY)")
            admin.execute("SELECT pg_create_physical_replication_slot('taken')")
        report = _check(tmp_path, {"dsn": server.dsn()})
        capture = CaptureSettings(
            SourceAddress.parse(server.dsn()), "slot", "publication", tmp_path / "spool"
        )
        with pytest.raises(WalLevelError, match="wal_level"):
            WalCapture(capture).with_publication_management({TableName("public", "t")}, manage=True).live()
        with psycopg.connect(server.dsn()) as admin:
            assert admin.execute("SELECT count(*) FROM pg_publication").fetchone() == (0,)
    assert report.exit_code == 3
    assert _codes(report) == {("server", "PEN-1103"), ("server", "PEN-1213"), ("server", "PEN-1214")}
    assert [finding.fix for finding in report.problems] == [
        "ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
        "ALTER SYSTEM SET max_replication_slots = 3; then restart the server",
        "ALTER SYSTEM SET max_wal_senders = 2; then restart the server",
    ]
    warned = {finding.code for finding in report.warnings}
    assert warned >= {"unbounded-wal", "short-sender-timeout", "small-decoding-memory", "idle-slot-timeout"}


@pytest.mark.parametrize("capture", ["wal", "trigger", "polling"])
def test_C05_postgres_13_is_refused_with_the_version_found_and_the_version_needed(
    too_old: EmbeddedPostgres, tmp_path: Path, capture: str
) -> None:
    report = _check(tmp_path, {"dsn": too_old.dsn(), "capture": capture})
    (problem,) = report.problems
    assert (report.exit_code, problem.step, problem.code, problem.fix) == (
        3,
        "connection",
        "PEN-1106",
        "upgrade the server",
    )
    assert problem.what.endswith("the server is Postgres 13.22, and Penstock needs 14 or newer")
    assert {step.state for step in report.steps if step.name in ("server", "tables", "reading")} == {
        StepState.SKIPPED
    }


def test_C05_capture_and_target_refuse_postgres_13_before_they_create_anything(
    too_old: EmbeddedPostgres, tmp_path: Path
) -> None:
    address = SourceAddress.parse(too_old.dsn())
    settings = CaptureSettings(address, "s", "p", tmp_path / "spool", tables=(TableName("public", "t"),))
    with pytest.raises(ServerUnfitError, match=r"the server is Postgres 13\.22"):
        WalCapture(settings).live()
    with (
        pytest.raises(ServerUnfitError, match=r"the server is Postgres 13\.22"),
        target_connection(address, "preparing"),
    ):
        pass
    with psycopg.connect(too_old.dsn()) as admin:
        made = "SELECT (SELECT count(*) FROM pg_publication), (SELECT count(*) FROM pg_replication_slots)"
        assert admin.execute(made).fetchall() == [(0, 0)]


@pytest.fixture(scope="module")
def too_old() -> Iterator[EmbeddedPostgres]:
    with server_directory() as directory, EmbeddedPostgres(directory / "data", 13, fsync=False) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            admin.execute("CREATE TABLE t (id int PRIMARY KEY)")
        yield server


# --- C03: authentication and TLS ----------------------------------------------------------------------------


class StrictServer:
    """A server with TLS, and a role for every authentication method."""

    def __init__(self, directory: Path, server: EmbeddedPostgres) -> None:
        self.directory = directory
        self._server = server

    def dsn(self, role: str, options: str = "", host: str = "127.0.0.1") -> str:
        return f"postgresql://{role}@{host}:{self._server.port}/postgres?{options}"

    def path(self, name: str) -> str:
        return str(self.directory / name)


@pytest.fixture(scope="module")
def strict() -> Iterator[StrictServer]:
    with server_directory() as directory:
        data = directory / "data"
        with (
            EmbeddedPostgres(data, VERSION, fsync=False) as server,
            psycopg.connect(server.dsn(), autocommit=True) as admin,
        ):
            admin.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
            for role in ("tls_role", "cert_role", "scram_role", "refused_role"):
                admin.execute(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD '{PASSWORD}'".encode())
        _make_certificates(directory)
        (data / "pg_hba.conf").write_text(HBA, encoding="utf-8")
        settings = {"ssl": "on", "ssl_ca_file": "ca.crt"}
        with EmbeddedPostgres(data, VERSION, settings, fsync=False) as server:
            yield StrictServer(directory, server)


def _make_certificates(directory: Path) -> None:
    """A CA, a certificate for the server's address, one for a client, and an untrusted CA."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for authority in ("ca", "other"):
        openssl(
            "req",
            "-x509",
            *key,
            "-days",
            "2",
            "-subj",
            f"/CN={authority}",
            "-keyout",
            f"{authority}.key",
            "-out",
            f"{authority}.crt",
        )
    (directory / "address").write_text("subjectAltName=IP:127.0.0.1", encoding="utf-8")
    for name, subject in (("server", "/CN=127.0.0.1"), ("client", "/CN=cert_role")):
        openssl("req", *key, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        sign = (
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-days",
            "2",
        )
        openssl(*sign, "-extfile", "address", "-out", f"{name}.crt")
    data = directory / "data"
    owner = data.stat()
    for name in ("server.crt", "server.key", "ca.crt"):
        target = data / name
        target.write_bytes((directory / name).read_bytes())
        target.chmod(0o600)
        os.chown(target, owner.st_uid, owner.st_gid)
    (directory / "client.key").chmod(0o600)


def test_C03_scram_and_certificates_reach_every_connection_the_snapshots_too(
    strict: StrictServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replication, catalog and snapshot use three connection paths; each must authenticate."""
    monkeypatch.setenv("STRICT_PASSWORD", PASSWORD)
    verified = {"mode": "verify-full", "root_cert": strict.path("ca.crt")}
    sources: list[dict[str, Any]] = [
        {"dsn": strict.dsn("scram_role"), "password": {"env": "STRICT_PASSWORD"}, "tls": {"mode": "disable"}},
        {"dsn": strict.dsn("scram_role"), "password": {"env": "STRICT_PASSWORD"}, "tls": verified},
        {"dsn": strict.dsn("tls_role", "sslmode=require")},
        {"dsn": strict.dsn("tls_role"), "tls": {"mode": "prefer"}},
        {"dsn": strict.dsn("scram_role"), "password": {"env": "STRICT_PASSWORD"}, "tls": {"mode": "prefer"}},
        # With verify-ca any certificate of the CA is accepted, whatever its name.
        {"dsn": strict.dsn("tls_role", host="localhost"), "tls": {**verified, "mode": "verify-ca"}},
        {
            "dsn": strict.dsn("cert_role"),
            "tls": {**verified, "cert": strict.path("client.crt"), "key": strict.path("client.key")},
        },
    ]
    for source in sources:
        report = _check(tmp_path, source)
        assert report.problems == [], source
        assert {step.name: step.state for step in report.steps}["reading"] is StepState.OK


def test_C03_every_refusal_is_final_and_shows_no_secret(
    strict: StrictServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRICT_PASSWORD", "not-" + PASSWORD)
    other = {"mode": "verify-full", "root_cert": strict.path("other.crt")}
    sources: list[dict[str, Any]] = [
        {"dsn": strict.dsn("scram_role"), "password": {"env": "STRICT_PASSWORD"}},
        {"dsn": strict.dsn("scram_role")},
        {"dsn": strict.dsn("tls_role"), "tls": {"mode": "disable"}},
        {"dsn": strict.dsn("tls_role"), "tls": other},
        {"dsn": strict.dsn("tls_role"), "tls": {**other, "mode": "verify-ca"}},
        {
            "dsn": strict.dsn("tls_role", host="localhost"),
            "tls": {"mode": "verify-full", "root_cert": strict.path("ca.crt")},
        },
        {"dsn": strict.dsn("cert_role", "sslmode=require")},
        {"dsn": strict.dsn("refused_role")},
    ]
    for source in sources:
        report = _check(tmp_path, source)
        assert _codes(report) == {("connection", "PEN-1102")}, (source, report.problems)
        assert report.exit_code == 3
        assert PASSWORD not in json.dumps(report.as_document())


# --- C03: a pooler ------------------------------------------------------------------------------------------


class _Pooler(socketserver.ThreadingTCPServer):
    """Refuses replication as PgBouncer does, and passes everything else on."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        super().__init__(("127.0.0.1", 0), _PoolerConnection)


class _PoolerConnection(socketserver.BaseRequestHandler):
    server: _Pooler

    def handle(self) -> None:
        head = self.request.recv(4, socket.MSG_WAITALL)
        packet = head + self.request.recv(int.from_bytes(head) - 4, socket.MSG_WAITALL)
        if b"\0replication\0" in packet:
            fields = b"SFATAL\0VFATAL\0C08P01\0Munsupported startup parameter: replication\0\0"
            self.request.sendall(b"E" + (len(fields) + 4).to_bytes(4) + fields)
            return
        with socket.create_connection(self.server.target) as upstream:
            upstream.sendall(packet)
            pair = {self.request: upstream, upstream: self.request}
            while True:
                for side in select.select(list(pair), [], [])[0]:
                    data = side.recv(65536)
                    if not data:
                        return
                    pair[side].sendall(data)


def test_C03_a_pooler_that_refuses_replication_is_named(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with database.connect() as direct:
        target = (direct.info.host, direct.info.port)
    with _Pooler(target) as pooler:
        threading.Thread(target=pooler.serve_forever, daemon=True).start()
        dsn = f"postgresql://postgres@127.0.0.1:{pooler.server_address[1]}/{database.name}?sslmode=disable&gssencmode=disable"
        report = _check(tmp_path, {"dsn": dsn})
        pooler.shutdown()
    assert _codes(report) == {("replication", "PEN-1106")}
    assert "PgBouncer" in (report.problems[0].fix or "")
