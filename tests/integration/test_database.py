"""The `database` fixture."""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest

from tests.support.fix_postgres import Database, PostgresServer, _url


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_has_a_fresh_database(database: Database, turn: int) -> None:
    database.execute("CREATE TABLE mine (turn int)")
    database.execute("INSERT INTO mine VALUES (%s)", turn)
    assert database.query("SELECT turn FROM mine WHERE turn = %s", turn) == [(turn,)]
    assert database.query("SHOW wal_level") == [("logical",)]


def test_statements_can_share_a_transaction(database: Database) -> None:
    with database.transaction():
        one = database.query("SELECT pg_current_xact_id()::text")
        assert database.query("SELECT pg_current_xact_id()::text") == one
    assert database.query("SELECT pg_current_xact_id()::text") != one


@pytest.mark.versions(14, 15, 16, 17, 18)
def test_a_test_runs_on_a_server_of_every_version_that_it_lists(
    database: Database, postgres_server: PostgresServer, postgres_version: int
) -> None:
    assert postgres_server.version == postgres_version
    assert database.query("SHOW server_version_num")[0][0].startswith(str(postgres_version))


@pytest.fixture(scope="module")
def held_version(postgres_server: PostgresServer) -> int:
    return postgres_server.version


@pytest.mark.versions(14, 18)
def test_module_fixture_is_created_again_for_another_version(
    held_version: int, postgres_version: int
) -> None:
    assert held_version == postgres_version


def test_module_fixture_has_the_default_version_elsewhere(held_version: int, postgres_version: int) -> None:
    assert held_version == postgres_version


@pytest.mark.versions(14, 18)
def test_a_database_is_dropped_even_while_its_slot_is_being_read(postgres_server: PostgresServer) -> None:
    created = postgres_server.create_database()
    created.execute("CREATE PUBLICATION p FOR ALL TABLES")
    created.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", f"{created.name}_s")
    command = (
        f"START_REPLICATION SLOT {created.name}_s LOGICAL 0/0 (proto_version '1', publication_names 'p')"
    )
    with closing(psycopg.connect(created.dsn, autocommit=True, replication="database")) as reader:
        reader.pgconn.exec_(command.encode())
        created.close()
        postgres_server.drop_database(created.name)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(created.dsn)


@pytest.mark.parametrize(
    ("dsn", "url"),
    [
        ("host=db.example port=6432 user=cdc dbname=x", "postgresql://cdc@db.example:6432/y"),
        (
            "postgresql://cdc:p%40ss@db.example/x?sslmode=require",
            "postgresql://cdc:p%40ss@db.example:5432/y?sslmode=require",
        ),
        ("host=/run/postgresql user=cdc", "postgresql://cdc@/y?host=%2Frun%2Fpostgresql"),
    ],
)
def test_any_dsn_can_point_at_another_database(dsn: str, url: str) -> None:
    assert _url(dsn, "y") == url
