"""Pipelines with `capture: polling`: the whole path from a statement in Postgres to a row in Delta."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from penstock.errors import SlotMissingError
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database

TABLES = ("public.orders", "public.customers", "public.visits")


def polled(database: Database, mirror: MirrorFactory, **polling: Any) -> Mirror:
    return mirror(
        source={"dsn": database.dsn, "capture": "polling", "polling": {"interval": "100 ms", **polling}}
    )


def assert_same(database: Database, pipeline: Mirror) -> None:
    """Call it while no session writes to the source."""
    for table in TABLES:
        target = sorted((row["id"], row["note"]) for row in pipeline.rows(table, "id, note"))
        assert target == sorted(database.query(f"SELECT id, note FROM {table}"))


def seed(database: Database) -> None:
    for table in TABLES:
        database.execute(
            f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text, at timestamptz NOT NULL DEFAULT now())"
        )
        database.execute(f"INSERT INTO {table} SELECT n, 'note ' || n FROM generate_series(1, 500) n")


def test_changes_of_every_kind_reach_the_target_by_polling(database: Database, mirror: MirrorFactory) -> None:
    seed(database)
    pipeline = polled(database, mirror, cursors={"public.orders": "at"})  # the others by xmin
    pipeline.run_once()
    assert_same(database, pipeline)
    for table in ("orders", "customers"):
        database.execute(f"UPDATE {table} SET note = 'changed', at = clock_timestamp() WHERE id <= 50")
        database.execute(f"UPDATE {table} SET id = id + 1000, at = clock_timestamp() WHERE id > 490")
        database.execute(f"DELETE FROM {table} WHERE id BETWEEN 100 AND 120")
        database.execute(f"INSERT INTO {table} (id, note) SELECT n, NULL FROM generate_series(2001, 2020) n")
    database.execute("TRUNCATE visits")
    pipeline.run_once()
    assert_same(database, pipeline)
    shutil.rmtree(pipeline.config.spool)
    database.execute("DELETE FROM orders WHERE id = 1")
    pipeline.run_once()
    assert_same(database, pipeline)
    # Finally the resume position is lost too.
    shutil.rmtree(pipeline.config.state / "polling")
    with pytest.raises(SlotMissingError, match="the resume point of polling is lost"):
        pipeline.run_once()
