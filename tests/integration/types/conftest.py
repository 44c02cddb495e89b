"""One database and one stream for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fix_postgres import PostgresServer
from tests.integration.types.roads import Roads


@pytest.fixture(scope="module")
def roads(postgres_server: PostgresServer) -> Iterator[Roads]:
    database = postgres_server.create_database()
    with Roads(database).open() as opened:
        yield opened
    database.close()
    postgres_server.drop_database(database.name)
