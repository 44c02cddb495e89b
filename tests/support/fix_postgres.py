"""A real Postgres for the whole run, and a fresh database for every test.

By default the server is embedded: version 18, or the one that PENSTOCK_TEST_PG_VERSION names. If
PENSTOCK_TEST_PG is set to the DSN of a superuser on a server with wal_level = logical, that server is used.

A test marked `@pytest.mark.versions(14, 18)` runs once on a server of each version; on a given server only if
its version is listed.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from penstock.testing.embedded import EmbeddedPostgres

Row = tuple[Any, ...]

_TEARDOWN_SECONDS = 20.0
_SETTINGS = {"max_prepared_transactions": "10", "track_commit_timestamp": "on"}


@contextmanager
def server_directory() -> Iterator[Path]:
    """A directory for the data of a server, which may run as another user.

    It is not in pytest's temporary directory, because every start of pytest removes the permissions of other
    users there.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as directory:
        yield Path(directory)


class PostgresServer:
    """The server under test, with one administrative connection."""

    def __init__(self, dsn: Callable[[str], str]) -> None:
        self.dsn = dsn
        self._admin = psycopg.connect(dsn("postgres"), autocommit=True, application_name="penstock-tests")
        self._prefix = f"penstock_test_{secrets.token_hex(3)}"
        self._numbers = itertools.count(1)
        self._template = f"{self._prefix}_template"
        self._admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._template)))

    @property
    def version(self) -> int:
        """The major version."""
        return self._admin.info.server_version // 10_000

    def create_database(self) -> Database:
        name = f"{self._prefix}_{next(self._numbers)}"
        create = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
            sql.Identifier(name), sql.Identifier(self._template)
        )
        self._admin.execute(create)
        return Database(name, self.dsn(name))

    def drop_database(self, name: str) -> None:
        """A slot keeps its database from being dropped, and a reader keeps its slot: end the readers, drop
        the slots, then the database.
        """
        deadline = time.monotonic() + _TEARDOWN_SECONDS
        while slots := self._slots(name):
            self._end_connections(name)
            for slot in slots:
                self._drop_slot(slot)
            if time.monotonic() > deadline:
                raise AssertionError(f"could not drop the replication slots of {name}: {slots}")
        self._admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def close(self) -> None:
        self.drop_database(self._template)
        self._admin.close()

    def _slots(self, database: str) -> list[str]:
        rows = self._admin.execute(
            "SELECT slot_name FROM pg_replication_slots WHERE database = %s", [database]
        ).fetchall()
        return [str(row[0]) for row in rows]

    def _end_connections(self, database: str) -> None:
        # The second argument: wait up to this many milliseconds until the backend is gone.
        self._admin.execute(
            "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity WHERE datname = %s", [database]
        )

    def _drop_slot(self, slot: str) -> None:
        # Taken again by a retrying reader, or temporary and dropped with its reader: the caller checks again.
        with suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
            self._admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])


class Database:
    """The database of one test. Each statement runs at once, in its own transaction."""

    def __init__(self, name: str, dsn: str) -> None:
        self.name = name
        self.dsn = dsn
        self._connection: psycopg.Connection | None = None

    def execute(self, statement: str, *arguments: object) -> None:
        self._open().execute(statement.encode(), arguments or None)

    def query(self, statement: str, *arguments: object) -> list[Row]:
        return self._open().execute(statement.encode(), arguments or None).fetchall()

    def connect(self, *, autocommit: bool = False) -> psycopg.Connection:
        """Another connection, for tests that hold transactions open; the caller closes it."""
        return psycopg.connect(self.dsn, autocommit=autocommit)

    def transaction(self) -> AbstractContextManager[object]:
        """Put the statements of a `with` block into one transaction."""
        return self._open().transaction()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _open(self) -> psycopg.Connection:
        # A test may have restarted the server, or cut our connection.
        if self._connection is None or self._connection.closed:
            self._connection = self.connect(autocommit=True)
        return self._connection


class PostgresServers:
    """The servers of this run, one for each version, started at first use."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._started: dict[int, PostgresServer] = {}

    def get(self, version: int) -> PostgresServer:
        if version not in self._started:
            self._started[version] = self._start(version)
        return self._started[version]

    def close(self) -> None:
        self._stack.close()

    def _start(self, version: int) -> PostgresServer:
        given = os.environ.get("PENSTOCK_TEST_PG")
        if given:
            server = PostgresServer(lambda database: _url(given, database))
        else:
            directory = self._stack.enter_context(server_directory())
            embedded = EmbeddedPostgres(directory / "data", version, _SETTINGS, fsync=False)
            self._stack.callback(embedded.stop, "immediate")
            embedded.start()
            server = PostgresServer(embedded.dsn)
        self._stack.callback(server.close)
        return server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("versions")
    if marker is None:
        return
    if "postgres_version" not in metafunc.fixturenames:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid} is marked with versions, but asks for no server"
        )
    foreign = os.environ.get("PENSTOCK_TEST_PG")
    versions = [version for version in marker.args if not foreign or version == _default_version()]
    # Indirect: a direct value would not reach the fixture, and fixtures that depend on it would not be
    # created again.
    metafunc.parametrize(
        "postgres_version",
        versions,
        ids=[f"pg{version}" for version in versions],
        indirect=True,
        scope="session",
    )


@pytest.fixture(scope="session")
def postgres_version(request: pytest.FixtureRequest) -> int:
    """The server's major version; a test marked with `versions` gets each of those in turn."""
    return int(getattr(request, "param", _default_version()))


@pytest.fixture(scope="session")
def postgres_servers() -> Iterator[PostgresServers]:
    servers = PostgresServers()
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def postgres_server(postgres_servers: PostgresServers, postgres_version: int) -> PostgresServer:
    return postgres_servers.get(postgres_version)


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[Database]:
    created = postgres_server.create_database()
    yield created
    created.close()
    postgres_server.drop_database(created.name)


@functools.cache
def _default_version() -> int:
    given = os.environ.get("PENSTOCK_TEST_PG")
    if not given:
        return int(os.environ.get("PENSTOCK_TEST_PG_VERSION", "18"))
    with psycopg.connect(given) as connection:
        return connection.info.server_version // 10_000


def _url(dsn: str, database: str) -> str:
    """The same server and role as `dsn`, as a URL, which every driver accepts."""
    options = {
        name: str(value)
        for name, value in conninfo_to_dict(dsn).items()
        if value is not None and name != "dbname"
    }
    user = quote(options.pop("user", "postgres"), safe="")
    password = options.pop("password", None)
    login = user if password is None else f"{user}:{quote(password, safe='')}"
    address = (
        ""
        if options.get("host", "/").startswith("/")
        else f"{options.pop('host')}:{options.pop('port', '5432')}"
    )
    query = f"?{urlencode(options)}" if options else ""
    return f"postgresql://{login}@{address}/{quote(database, safe='')}{query}"
