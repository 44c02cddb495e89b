"""Replies of a schema registry and the resulting errors. `tests/contract/test_postgres_connector.py` uses a
real one.
"""

from __future__ import annotations

import socket
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typing_extensions import override

from penstock.connectors.schema_registry import SchemaRegistry
from penstock.connectors.settings import ConnectorSettings, RegistryAddress
from penstock.contracts.schemas import Compatibility, RegisteredSchema
from penstock.errors import (
    ConfigError,
    PenstockError,
    Recovery,
    RegistryError,
    RegistryRefusedError,
    SchemaIncompatibleError,
)
from penstock.secret import Secret


class Answering(BaseHTTPRequestHandler):
    """Returns the prepared replies and records the requests."""

    status = 200
    body = b"{}"
    location = ""
    asked: list[tuple[str, str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.command, self.path, self.headers.get("Authorization")))
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        if self.location:
            self.send_header("Location", self.location)
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Keep the log out of the test output."""


class Registry:
    """A registry on the loopback address, and its client."""

    def __init__(self) -> None:
        self.answering: type[Answering] = type("Scripted", (Answering,), {"asked": []})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.answering)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        self.address = RegistryAddress(
            f"http://127.0.0.1:{self.server.server_port}/api", "reader", Secret("geheim"), timeout_seconds=10
        )
        self.client = SchemaRegistry(self.address)

    @property
    def asked(self) -> list[tuple[str, str, str | None]]:
        return self.answering.asked

    def says(self, status: int, body: str) -> None:
        self.answering.status, self.answering.body = status, body.encode()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def registry() -> Iterator[Registry]:
    with closing(Registry()) as running:
        yield running


def test_a_question_names_the_subject_exactly_and_the_login_is_sent_with_it(registry: Registry) -> None:
    registry.says(200, '{"id": 3, "version": 2, "schema": "{}"}')
    assert registry.client.look_up('odd/sub ject"?') == RegisteredSchema('odd/sub ject"?', 3, 2, "{}")
    ((method, path, login),) = registry.asked
    assert (method, path) == ("GET", "/api/subjects/odd%2Fsub%20ject%22%3F/versions/latest")
    assert login is not None
    assert b64decode(login.removeprefix("Basic ")).decode() == "reader:geheim"


def test_the_login_is_sent_to_the_registry_and_not_to_redirects(registry: Registry) -> None:
    with closing(Registry()) as other:
        registry.says(302, "")
        registry.answering.location = f"{other.address.url}/elsewhere"
        other.says(200, '{"id": 3, "version": 2, "schema": "{}"}')
        assert registry.client.look_up("s") is not None
        assert [login is None for _, _, login in (*registry.asked, *other.asked)] == [False, True]


@pytest.mark.parametrize("code", [40401, 40402, 40403])
def test_missing_schema_is_none(registry: Registry, code: int) -> None:
    registry.says(404, f'{{"error_code": {code}, "message": "not found"}}')
    assert registry.client.look_up("s") is None
    assert registry.client.look_up("s", 7) is None
    assert registry.client.check("s", "{}") == Compatibility(True), (
        "nothing is there that it could be at odds with"
    )


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ('{"is_compatible": false, "messages": ["one", "two"]}', ("one", "two")),
        ('{"is_compatible": false, "reason": "three"}', ("three",)),
        ('{"is_compatible": false, "reason": null}', ()),
    ],
)
def test_the_reasons_of_either_kind_of_registry_are_kept(
    registry: Registry, body: str, reasons: tuple[str, ...]
) -> None:
    registry.says(200, body)
    assert registry.client.check("s", "{}") == Compatibility(False, reasons)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (409, '{"error_code": 409, "message": "no"}', SchemaIncompatibleError),
        (401, "who are you", RegistryRefusedError),
        (403, "{}", RegistryRefusedError),
        (404, "<html>not found</html>", RegistryRefusedError),
        (404, '{"error_code": 0, "message": "no such thing"}', RegistryRefusedError),
        (422, '{"error_code": 42201, "message": "not a schema"}', RegistryRefusedError),
        (429, "{}", RegistryError),
        (500, "[]", RegistryError),
        (503, "", RegistryError),
        (200, "not JSON", RegistryError),
        (200, "[1, 2]", RegistryError),
        (200, "{}", RegistryError),
    ],
)
def test_every_registry_reply_becomes_one_of_our_errors(
    registry: Registry, status: int, body: str, kind: type[PenstockError]
) -> None:
    registry.says(status, body)
    for ask in (
        lambda: registry.client.register("s", "{}"),
        lambda: registry.client.look_up("s"),
        lambda: registry.client.check("s", "{}"),
    ):
        with pytest.raises(RegistryError) as caught:
            ask()
        assert type(caught.value) is kind
        assert (caught.value.recovery is Recovery.RETRY) == (kind is RegistryError)
        assert "geheim" not in str(caught.value)


def test_a_registry_that_does_not_answer_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SchemaRegistry(
            RegistryAddress(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=0.2)
        )
        before = time.monotonic()
        with pytest.raises(RegistryError, match="does not respond"):
            client.look_up("s")
        assert time.monotonic() - before < 10
    with pytest.raises(RegistryError, match="does not respond"):
        client.look_up("s")


OPTIONS = {"dsn": "host=h dbname=d", "slot": "s", "spool": "/tmp/nowhere"}


def test_options_say_where_the_registry_is_and_show_no_password() -> None:
    given = {
        **OPTIONS,
        "registryUrl": "https://r.example/api/",
        "REGISTRYUSER": "u",
        "registryPassword": "geheim",
        "registryPrefix": "shop.",
    }
    settings = ConnectorSettings.from_options(given)
    assert settings.registry == RegistryAddress("https://r.example/api", "u", Secret("geheim"), "shop.", 10.0)
    assert "geheim" not in repr(settings)
    assert ConnectorSettings.from_options(OPTIONS).registry is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("spool", "", "'spool' is missing"),
        ("registryUrl", "file:///etc/passwd", "not an http"),
        ("registryUrl", "http://u:p@host/", "contains a user name or password"),
        ("snapshot", "sometimes", "'snapshot'"),
        ("unhealthyErrors", "-1", "'unhealthyErrors'"),
        ("discoverSeconds", "nan", "'discoverSeconds'"),
        ("process", "separate", "does not support 'separate' as the option 'process'"),
        ("tables", "[1]", "'tables'"),
        ("snapshots", "initial", "no option 'snapshots'"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ConnectorSettings.from_options({**OPTIONS, name: value})
    assert caught.value.hint
    assert "passwd" not in str(caught.value)


def test_a_password_in_the_dsn_is_stored_separately() -> None:
    settings = ConnectorSettings.from_options({**OPTIONS, "dsn": "postgresql://u:geheim@h/d"})
    assert settings.capture.address.password == Secret("geheim")
    assert "geheim" not in repr(settings)
    assert "geheim" not in settings.capture.address.dsn


@pytest.mark.parametrize("text", ["public.a,public.b", ' public.a , public."b" ', '["public.a", "public.b"]'])
def test_tables_are_names_with_commas_or_a_json_list(text: str) -> None:
    settings = ConnectorSettings.from_options({**OPTIONS, "tables": text})
    assert [str(table) for table in settings.tables] == ["public.a", "public.b"]
