"""Adoption of existing tables in a Postgres target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import TargetForeignError
from tests.support.contract.postgres_harness import PostgresHarness
from tests.support.contract.sink_harness import ITEMS
from tests.support.fix_postgres import Database

THERE = """
    CREATE SCHEMA copy_public;
    CREATE TABLE copy_public.items (size numeric, id bigint PRIMARY KEY, note text);
    INSERT INTO copy_public.items VALUES (0, 100, 'old'), (1.50, 1, 'note 1');
    COMMENT ON TABLE copy_public.items IS 'known to many';
    GRANT SELECT ON copy_public.items TO PUBLIC;
    CREATE VIEW copy_public.seen AS SELECT id FROM copy_public.items
"""


@pytest.fixture
def harness(shared_database: Database, tmp_path: Path) -> Iterator[PostgresHarness]:
    shared_database.execute("DROP SCHEMA IF EXISTS penstock, copy_public, mirror CASCADE")
    made = PostgresHarness(tmp_path, shared_database)
    yield made
    made.sink.close()


def _state(database: Database) -> list[tuple[object, ...]]:
    return database.query(
        "SELECT oid, relacl::text, obj_description(oid) FROM pg_class "
        "WHERE oid = 'copy_public.items'::regclass"
    )


def test_K10_an_adopted_table_keeps_its_rows_until_the_copy_is_complete_and_its_other_properties(
    harness: PostgresHarness,
) -> None:
    database = harness.database
    database.execute(THERE)
    before = _state(database)
    assert harness.sink.adopt(harness.table) is False
    assert harness.target().applied is None
    place = harness.begin()
    rows = harness.source.states[harness.source.fence]
    files = [harness.write(place, number, part)[0] for number, part in enumerate((rows[:5], rows[5:], []))]
    assert database.query("SELECT id FROM copy_public.items ORDER BY id") == [(1,), (100,)]
    harness.sink.finish_snapshot(harness.table, files, harness.fence)
    assert harness.rows() == harness.source.sorted_rows()
    assert _state(database) == before
    assert database.query("SELECT count(*) FROM copy_public.seen") == [(9,)]


@pytest.mark.parametrize(
    ("alteration", "reason"),
    [
        ("ALTER TABLE copy_public.items ADD extra int", "'extra'"),
        ("ALTER TABLE copy_public.items ALTER size TYPE float8", "'size' is double precision"),
        ("ALTER TABLE copy_public.items DROP CONSTRAINT items_pkey", "primary key"),
    ],
)
def test_K10_a_table_that_does_not_fit_is_not_adopted(
    harness: PostgresHarness, alteration: str, reason: str
) -> None:
    harness.database.execute(THERE)
    harness.database.execute(alteration)
    with pytest.raises(TargetForeignError, match=reason):
        harness.sink.adopt(harness.table)
    with pytest.raises(TargetForeignError):
        harness.sink.load_target(ITEMS)
    assert harness.database.query("SELECT count(*) FROM copy_public.items") == [(2,)]


def test_K10_a_table_of_another_pipeline_is_adopted_from_it(harness: PostgresHarness) -> None:
    harness.copy()
    harness.sink.close()
    other = harness.open("other")
    with pytest.raises(TargetForeignError, match="'shop'"):
        other.load_target(ITEMS)
    assert other.adopt(harness.table) is False
    target = other.load_target(ITEMS)
    assert target is not None
    assert target.applied is None
    other.close()
    with pytest.raises(TargetForeignError, match="'other'"):
        harness.sink.load_target(ITEMS)
