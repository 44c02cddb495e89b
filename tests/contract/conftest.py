"""Fixtures of the contract tests. A module shares one database; names in it contain the name of the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.contract.crash_table import Busy, CrashTable, Kind
from tests.support.contract.sink_setups import (
    MORE_SINK_SETUPS,
    SINK_SETUPS,
    SPARK,
    Cell,
    NewSinkSetup,
    PostgresSetup,
    SinkSetup,
)
from tests.support.contract.trigger_harness import TriggerHarness, trigger_harness
from tests.support.contract.wal_harness import WalHarness, wal_harness
from tests.support.fix_postgres import Database, PostgresServer


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


@pytest.fixture
def trigger(shared_database: Database, tmp_path: Path) -> Iterator[TriggerHarness]:
    with trigger_harness(shared_database, tmp_path) as harness:
        yield harness


@pytest.fixture(scope="session")
def new_setup(
    request: pytest.FixtureRequest, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NewSinkSetup]:
    """Spark is started by the first test that needs it."""
    database = postgres_server.create_database()

    def make(name: str) -> SinkSetup:
        spark = request.getfixturevalue("spark") if name in SPARK else None
        place = (SINK_SETUPS | MORE_SINK_SETUPS)[name](tmp_path_factory.mktemp(name), spark)
        if isinstance(place, PostgresSetup):
            database.execute('DROP SCHEMA IF EXISTS penstock, copy_public, "copy_odd. schema" CASCADE')
            place.dsn = database.dsn
        return place

    yield make
    database.close()
    postgres_server.drop_database(database.name)


@pytest.fixture
def kind() -> Kind:
    """The workload of the source, unless a test chooses another."""
    return Busy


@pytest.fixture
def crash_table(cell: Cell, kind: Kind, new_setup: NewSinkSetup) -> Iterator[CrashTable]:
    place = new_setup(cell[0])
    made = CrashTable(place, place.open(cell[1]), cell[1], kind=kind)
    yield made
    made.sink.close()
