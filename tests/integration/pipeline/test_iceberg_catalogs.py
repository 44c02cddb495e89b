"""A pipeline into Iceberg with a JDBC or REST catalog: from the first row to the comparison with the
source.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.table_commands import order
from tests.support.fix_catalog import Described, Kind
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.sinks.iceberg_lake import new_catalog

_TABLES = """
CREATE SCHEMA "odd schema";
CREATE TABLE items (id int PRIMARY KEY, note text, n numeric, tags text[]);
ALTER TABLE items ALTER note SET STORAGE EXTERNAL;
INSERT INTO items SELECT g, repeat('x', 5000) || g, g / 7.0, ARRAY[g::text, NULL] FROM generate_series(1,
  100) g;
CREATE TABLE "odd schema"."It's" ("the key" date PRIMARY KEY, "a.b" text);
INSERT INTO "odd schema"."It's" VALUES ('infinity', 'one'), ('-infinity', 'two'), ('2024-01-01', 'three')
"""
_CHANGES = """
UPDATE items SET n = 7 WHERE id <= 20;
UPDATE items SET id = 1000 + id WHERE id BETWEEN 30 AND 40;
DELETE FROM items WHERE id BETWEEN 50 AND 60;
ALTER TABLE items ADD COLUMN more int;
INSERT INTO items (id, more) VALUES (500, 5);
UPDATE "odd schema"."It's" SET "a.b" = 'changed' WHERE "the key" = 'infinity'
"""
_NAMES = ("public.items", '"odd schema".It\'s')


@pytest.fixture(params=["jdbc", "rest"])
def made(
    request: pytest.FixtureRequest,
    mirror: MirrorFactory,
    described: Callable[[Kind], Described],
    tmp_path: Path,
) -> Mirror:
    name, spark = new_catalog(), request.getfixturevalue("spark")
    settings = {
        f".{key}": value for key, value in described(request.param)(name, tmp_path / "tables").items()
    }
    settings[""] = "org.apache.iceberg.spark.SparkCatalog"
    conf = {f"spark.sql.catalog.{name}{key}": value for key, value in settings.items()}
    for key, value in conf.items():
        spark.conf.set(key, value)
    sink = {"iceberg": {"catalog": name, "namespace": "shop", "warehouse": "lake"}}
    return mirror(sink=sink, spark={"conf": conf}, tables=["public.*", "odd schema.*"])


def test_a_pipeline_into_a_catalog_of_others_equals_its_source_after_every_kind_of_change(
    database: Database, made: Mirror
) -> None:
    database.execute(_TABLES)
    made.run_once()
    database.execute(_CHANGES)
    made.run_once()
    made.assert_equal(*_NAMES)
    # Without Spark's checkpoint and the spool, each table's applied position is in the target; one is
    # resynced, through a shadow.
    shutil.rmtree(made.config.checkpoint)
    shutil.rmtree(made.config.spool)
    database.execute("DELETE FROM items WHERE id < 10")
    order(made.path, ["public.items"], "resync")
    made.run_once()
    made.assert_equal(*_NAMES)
