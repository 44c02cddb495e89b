"""One database for all tests of a module; what must not be shared is named for the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.wal_harness import WalHarness, wal_harness
from tests.fix_postgres import Database, PostgresServer


@pytest.fixture(scope="module")
def shared_database(postgres_server: PostgresServer) -> Iterator[Database]:
    created = postgres_server.create_database()
    yield created
    created.close()
    postgres_server.drop_database(created.name)


@pytest.fixture
def wal(shared_database: Database, tmp_path: Path) -> Iterator[WalHarness]:
    with wal_harness(shared_database, tmp_path) as harness:
        yield harness
