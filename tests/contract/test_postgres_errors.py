"""Errors of a Postgres target: they name the cause and the fix, and contain no row values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.errors import ConfigError, PenstockError, PrivilegeError, Recovery, SinkRefusedError
from penstock.postgres.connection import SourceAddress
from penstock.postgres.target.ddl import probe_target
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.postgres.targets import Naming, PostgresTargets
from tests.support.contract.postgres_harness import PostgresHarness
from tests.support.contract.sink_harness import ITEMS, PIPELINE
from tests.support.fix_postgres import Database


@pytest.fixture
def harness(shared_database: Database, tmp_path: Path) -> Iterator[PostgresHarness]:
    shared_database.execute("DROP SCHEMA IF EXISTS penstock, copy_public, mirror CASCADE")
    made = PostgresHarness(tmp_path, shared_database)
    yield made
    made.sink.close()


@contextmanager
def raising(harness: PostgresHarness, state: str) -> Iterator[None]:
    """An insert into the table runs a trigger that raises an error."""
    harness.database.execute(
        f"""
        CREATE OR REPLACE FUNCTION copy_public.tell() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN
                RAISE EXCEPTION 'no place for %', NEW.note
                    USING ERRCODE = '{state}', DETAIL = NEW.note, HINT = NEW.note;
            END$$;
        CREATE TRIGGER tell BEFORE INSERT ON copy_public.items
            FOR EACH ROW EXECUTE FUNCTION copy_public.tell()
        """
    )
    yield
    harness.database.execute("DROP TRIGGER tell ON copy_public.items")


@pytest.mark.parametrize("state", ["P0001", "P0002", "45000", "XX000", "38000", "23514", "22023"])
def test_error_of_a_trigger_does_not_show_row_values(harness: PostgresHarness, state: str) -> None:
    harness.copy()
    harness.source.insert(harness.item(20, "secret"))
    with raising(harness, state), pytest.raises(SinkRefusedError) as refused:
        harness.follow()
    assert "secret" not in f"{refused.value} {refused.value.hint}"
    assert f"SQLSTATE {state}" in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("function", "recovery"),
    [("pg_cancel_backend", Recovery.RETRY), ("pg_terminate_backend", Recovery.RETRY)],
)
def test_a_copy_that_the_server_ends_does_not_tell_at_which_row(
    harness: PostgresHarness, function: str, recovery: Recovery
) -> None:
    """Its context is the row: `COPY items, line 1: "20 secret"`."""
    harness.copy()
    harness.database.execute(
        f"CREATE FUNCTION copy_public.wait(text) RETURNS bool LANGUAGE plpgsql AS "
        f"'BEGIN PERFORM pg_catalog.{function}(pg_catalog.pg_backend_pid()), pg_catalog.pg_sleep(60); "
        "RETURN true; END'"
    )
    harness.database.execute("ALTER TABLE copy_public.items ADD CHECK (copy_public.wait(note)) NOT VALID")
    harness.source.insert(harness.item(20, "secret"))
    with pytest.raises(PenstockError) as ended:
        harness.follow()
    assert ended.value.recovery is recovery
    assert "secret" not in str(ended.value)


@pytest.mark.parametrize(
    ("state", "recovery"),
    [("53100", Recovery.RETRY), ("57014", Recovery.RETRY), ("42501", Recovery.OPERATOR)],
)
def test_a_trigger_that_speaks_in_the_server_s_name_is_not_quoted_either(
    harness: PostgresHarness, state: str, recovery: Recovery
) -> None:
    harness.copy()
    harness.source.insert(harness.item(20, "secret"))
    with raising(harness, state), pytest.raises(PenstockError) as refused:
        harness.follow()
    assert "secret" not in f"{refused.value} {refused.value.hint}"
    assert refused.value.recovery is recovery


def test_objects_that_block_the_replacement_of_a_table_are_named(harness: PostgresHarness) -> None:
    harness.copy()
    harness.database.execute("CREATE VIEW copy_public.notes AS SELECT note FROM copy_public.items")
    harness.sink.release_ownership(ITEMS)
    harness.table = TableSchema(
        harness.table.oid, ITEMS, (*harness.table.columns[:2], Column("size", harness.types[2], 25)), ("id",)
    )
    with pytest.raises(
        SinkRefusedError, match=r"view copy_public\.notes depends on table copy_public\.items"
    ) as refused:
        harness.copy()
    assert refused.value.hint is not None
    assert "drop the objects that the message names" in refused.value.hint


def test_a_schema_of_the_source_that_is_called_as_ours_needs_another_name(harness: PostgresHarness) -> None:
    orders = TableName("penstock", "orders")
    targets = PostgresTargets(harness.address, PIPELINE, Naming())
    with pytest.raises(ConfigError, match="which is reserved for Penstock") as refused:
        targets.load_target(orders)
    assert refused.value.hint is not None
    assert "schemas: {penstock: copied_penstock}" in refused.value.hint
    assert (
        PostgresTargets(harness.address, PIPELINE, Naming({"penstock": "copied_penstock"})).load_target(
            orders
        )
        is None
    )


@pytest.fixture
def loader(harness: PostgresHarness) -> Iterator[str]:
    name = f"loader_{harness.database.name}"
    harness.database.execute(
        f"CREATE ROLE {name} LOGIN; REVOKE TEMPORARY ON DATABASE {harness.database.name} FROM public"
    )
    yield name
    harness.database.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")
    harness.database.execute(f"GRANT TEMPORARY ON DATABASE {harness.database.name} TO public")


def test_a_check_names_the_missing_privilege_and_the_grant(harness: PostgresHarness, loader: str) -> None:
    address = SourceAddress.parse(harness.database.dsn.replace("postgres@", f"{loader}@"))
    targets = PostgresTargets(address, PIPELINE, Naming({"sales": "mirror"}, "copy_"))
    tables = [ITEMS, TableName("sales", "orders"), TableName("later", "events")]
    harness.put_foreign()
    harness.database.execute("CREATE SCHEMA mirror")
    with pytest.raises(PrivilegeError):
        probe_target(address)
    found = targets.find_problems(tables)
    assert [error.message for error in found] == [
        "the role may not create temporary tables, which an epoch needs for its keys",
        "schema 'copy_later' does not exist, and the role may not create it",
        "the table copy_public.items belongs to another role",
        "the role may not create tables in schema 'copy_public'",
        "the role may not create tables in schema 'mirror'",
        "schema 'penstock' does not exist, and the role may not create it",
    ]
    temporary, *others = found
    for error in others:
        assert error.hint is not None
        harness.database.execute(error.hint)
    assert [error.message for error in targets.find_problems(tables)] == [temporary.message]
    with pytest.raises(PrivilegeError, match="temporary"):
        probe_target(address)
    harness.database.execute(str(temporary.hint))
    assert targets.find_problems(tables) == []
    probe_target(address)
    assert harness.database.query("SELECT nspname FROM pg_namespace WHERE nspname ~ '^penstock'") == []
