"""One database for all tests of a module; what must not be shared is named for the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.places import MORE_PLACES, PLACES, SPARK, Cell, NewPlace, Place, PostgresPlace
from tests.contract.trigger_harness import TriggerHarness, trigger_harness
from tests.contract.wal_harness import WalHarness, wal_harness
from tests.contract.workshop import Busy, Kind, Workshop
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


@pytest.fixture
def trigger(shared_database: Database, tmp_path: Path) -> Iterator[TriggerHarness]:
    with trigger_harness(shared_database, tmp_path) as harness:
        yield harness


@pytest.fixture(scope="session")
def new_place(
    request: pytest.FixtureRequest, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NewPlace]:
    """Spark is started by whoever needs it first."""
    database = postgres_server.create_database()

    def make(name: str) -> Place:
        spark = request.getfixturevalue("spark") if name in SPARK else None
        place = (PLACES | MORE_PLACES)[name](tmp_path_factory.mktemp(name), spark)
        if isinstance(place, PostgresPlace):
            database.execute('DROP SCHEMA IF EXISTS penstock, copy_public, "copy_odd. schema" CASCADE')
            place.dsn = database.dsn
        return place

    yield make
    database.close()
    postgres_server.drop_database(database.name)


@pytest.fixture
def kind() -> Kind:
    """What a source is like of which nothing is said."""
    return Busy


@pytest.fixture
def workshop(cell: Cell, kind: Kind, new_place: NewPlace) -> Iterator[Workshop]:
    place = new_place(cell[0])
    made = Workshop(place, place.open(cell[1]), cell[1], kind=kind)
    yield made
    made.sink.close()
