"""One database and one stream on each server, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.fix_postgres import PostgresServers
from tests.integration.types.roads import Roads


@pytest.fixture(scope="session")
def roads_by_version(postgres_servers: PostgresServers) -> Iterator[RoadsByVersion]:
    with ExitStack() as stack:
        yield RoadsByVersion(postgres_servers, stack)


class RoadsByVersion:
    def __init__(self, servers: PostgresServers, stack: ExitStack) -> None:
        self._servers = servers
        self._stack = stack
        self._opened: dict[int, Roads] = {}

    def get(self, version: int) -> Roads:
        if version not in self._opened:
            server = self._servers.get(version)
            database = server.create_database()
            self._stack.callback(server.drop_database, database.name)
            self._stack.callback(database.close)
            self._opened[version] = self._stack.enter_context(Roads(database).open())
        return self._opened[version]


@pytest.fixture
def roads(roads_by_version: RoadsByVersion, postgres_version: int) -> Roads:
    found = roads_by_version.get(postgres_version)
    found.changes()
    return found
