"""One database and one stream for each server version, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.fix_postgres import PostgresServers
from tests.support.types.both_paths import BothPaths


@pytest.fixture(scope="session")
def paths_by_version(postgres_servers: PostgresServers) -> Iterator[BothPathsByVersion]:
    with ExitStack() as stack:
        yield BothPathsByVersion(postgres_servers, stack)


class BothPathsByVersion:
    def __init__(self, servers: PostgresServers, stack: ExitStack) -> None:
        self._servers = servers
        self._stack = stack
        self._opened: dict[int, BothPaths] = {}

    def get(self, version: int) -> BothPaths:
        if version not in self._opened:
            server = self._servers.get(version)
            database = server.create_database()
            self._stack.callback(server.drop_database, database.name)
            self._stack.callback(database.close)
            self._opened[version] = self._stack.enter_context(BothPaths(database).open())
        return self._opened[version]


@pytest.fixture
def paths(paths_by_version: BothPathsByVersion, postgres_version: int) -> BothPaths:
    found = paths_by_version.get(postgres_version)
    found.changes()
    return found
