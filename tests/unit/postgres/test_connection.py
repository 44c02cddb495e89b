"""Classification of refused connections when the server uses another language and libpq gives no SQLSTATE."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.errors import (
    AuthenticationError,
    ConfigError,
    ConnectionLostError,
    PenstockError,
    PrivilegeError,
    Recovery,
    SenderLimitError,
)
from penstock.postgres.connection import (
    Connection,
    SourceAddress,
    classify,
    connect,
    connect_replication,
    tls_weakness,
)

STUB = Path(__file__).parents[2] / "support" / "refusing_server.py"


@contextmanager
def refusal(severity: str, code: str, message: str) -> Iterator[SourceAddress]:
    with subprocess.Popen(
        [sys.executable, STUB, severity, code, message], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        try:
            yield SourceAddress.parse(f"postgresql://cdc@127.0.0.1:{port}/shop?sslmode=disable")
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("severity", "code", "message", "kind"),
    [
        ("FATAL", "57P03", "the database system is starting up", ConnectionLostError),
        ("ВАЖНО", "57P03", "система баз данных запускается", ConnectionLostError),
        ("FATAL", "57P03", "das Datenbanksystem startet", ConnectionLostError),
        ("FATAL", "53300", "sorry, too many clients already", ConnectionLostError),
        ("FATAL", "28P01", 'password authentication failed for user "cdc"', AuthenticationError),
        ("ВАЖНО", "28P01", 'пользователь "cdc" не прошёл проверку подлинности', AuthenticationError),
        ("ÖLÜMCÜL (FATAL)", "28000", "rol yok", AuthenticationError),
        ("致命错误", "3D000", '数据库 "shop" 不存在', AuthenticationError),
        ("FATAL", "28P01", 'password authentication failed for user "replication_user"', AuthenticationError),
        ("FATAL", "3D000", 'database "REPLICATION" does not exist', AuthenticationError),
        (
            "FATAL",
            "28P01",
            "Passwort-Authentifizierung für Benutzer »REPLICATION« fehlgeschlagen",
            AuthenticationError,
        ),
        (
            "FATAL",
            "28000",
            'no pg_hba.conf entry for replication connection from host "::1", user "cdc"',
            AuthenticationError,
        ),
        ("FATAL", "42501", "must be superuser or replication role to start walsender", PrivilegeError),
        ("FATAL", "42501", "permission denied to start WAL sender", PrivilegeError),
    ],
)
def test_C02_a_refusal_is_distinguished_from_a_server_that_is_starting(
    severity: str, code: str, message: str, kind: type[PenstockError]
) -> None:
    with (
        refusal(severity, code, message) as address,
        pytest.raises(PenstockError) as caught,
        connect(address),
    ):
        pass
    assert type(caught.value) is kind


@pytest.mark.parametrize("state", ["40001", "40P01"])
def test_a_transaction_that_lost_against_others_is_tried_again(state: str) -> None:
    assert classify(state, "could not serialize access", "asking").recovery is Recovery.RETRY


def test_L13_a_server_without_a_free_sender_is_known_by_the_setting_that_it_names() -> None:
    words = "число запрошенных подключений резервных серверов превосходит max_wal_senders (сейчас: 10)"
    with refusal("ВАЖНО", "53300", words) as address, pytest.raises(SenderLimitError):
        connect_replication(address)


def test_C01_an_unreachable_server_is_a_lost_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (
        pytest.raises(ConnectionLostError),
        connect(SourceAddress.parse(f"postgresql://cdc@127.0.0.1:{port}/shop")),
    ):
        pass


@pytest.mark.parametrize(
    "name", ["sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"]
)
@pytest.mark.parametrize("dsn", ["postgresql://cdc@db/shop?{}=hunter2", "host=db {}=hunter2"])
def test_a_secret_of_libpq_in_a_dsn_is_refused_and_not_shown(name: str, dsn: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        SourceAddress.parse(dsn.format(name))
    assert "hunter2" not in f"{caught.value} {caught.value.__cause__}"


def test_a_dsn_that_cannot_be_parsed_is_not_quoted() -> None:
    with pytest.raises(ConfigError) as caught:
        SourceAddress.parse("host=db password=hunter2 hunter3")
    assert caught.value.__cause__ is None
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "mode", "is_weak"),
    [
        ("10.0.0.7", "prefer", True),
        ("10.0.0.7", "require", True),
        ("10.0.0.7", "verify-ca", True),
        ("10.0.0.7", "verify-full", False),
        ("fe80::1%eth0", "require", True),
        ("127.0.0.1", "disable", False),
        ("::1", "prefer", False),
        ("", "prefer", False),
    ],
)
def test_a_connection_over_the_network_that_does_not_verify_the_server_is_weak(
    address: str, mode: str, is_weak: bool
) -> None:
    option = SimpleNamespace(keyword=b"sslmode", val=mode.encode())
    connection = SimpleNamespace(
        info=SimpleNamespace(hostaddr=address, host="db.example"), pgconn=SimpleNamespace(info=[option])
    )
    weakness = tls_weakness(cast(Connection, connection))
    assert (weakness is not None) == is_weak
    assert weakness is None or (mode in weakness and "db.example" in weakness)
