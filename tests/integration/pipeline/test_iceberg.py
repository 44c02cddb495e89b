"""A pipeline into Iceberg, from the first row to the comparison with the source."""

from __future__ import annotations

import shutil

from penstock.cli.table_commands import order
from penstock.pipeline.checks.environment import check_places
from penstock.pipeline.sink_factory import open_targets
from penstock.schema import TableName
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.sinks.iceberg_lake import new_catalog

_TABLES = """
CREATE SCHEMA "odd schema";
CREATE TABLE items (id int PRIMARY KEY, small smallint, note text, n numeric, at timestamptz,
  plain timestamp, tags text[], h jsonb);
CREATE TABLE "odd schema"."It's" ("the key" date, "a.b" text, PRIMARY KEY ("the key"));
CREATE TABLE nameless (a int, f float8, t text[]);
ALTER TABLE nameless REPLICA IDENTITY FULL;
INSERT INTO nameless VALUES (1, 0.5, '{x}'), (1, 0.5, '{x}'), (1, 0.5, '{x}'), (1, 0.5, '{y}'), (NULL, 'NaN',
  NULL), (NULL, 'NaN', NULL);
ALTER TABLE items ALTER note SET STORAGE EXTERNAL;
INSERT INTO items
SELECT g, g, repeat('x', 5000) || g, g / 7.0, now(), now(), ARRAY[g::text, NULL],
  '{"a": 1}' FROM generate_series(1, 300) g;
INSERT INTO items (id, n, at) VALUES (-1, 'NaN', 'infinity'), (-2, '1e100', '0044-01-01 BC');
INSERT INTO "odd schema"."It's" VALUES ('infinity', 'one'), ('-infinity', 'two'), ('2024-01-01', 'three');
CREATE SCHEMA s1; CREATE TABLE s1.shard (id int PRIMARY KEY, note text); INSERT INTO s1.shard SELECT g,
  'one' FROM generate_series(1, 9) g;
CREATE SCHEMA s2; CREATE TABLE s2.shard (id int PRIMARY KEY, note text); INSERT INTO s2.shard SELECT g,
  'two' FROM generate_series(1, 9) g
"""
_CHANGES = """
UPDATE items SET small = 7 WHERE id <= 20;
UPDATE items SET id = 1000 + id WHERE id BETWEEN 30 AND 40;
DELETE FROM items WHERE id BETWEEN 50 AND 60;
INSERT INTO items (id, note) VALUES (500, 'new'), (501, repeat('y', 9000));
UPDATE items SET n = 2 WHERE id = 501;
DELETE FROM nameless WHERE ctid IN (SELECT min(ctid) FROM nameless GROUP BY a, f, t);
INSERT INTO nameless VALUES (2, 1, '{}'), (2, 1, '{}');
UPDATE "odd schema"."It's" SET "a.b" = 'changed' WHERE "the key" = 'infinity';
DELETE FROM s2.shard WHERE id = 2;
UPDATE s1.shard SET note = 'gone soon' WHERE id = 3;
TRUNCATE s1.shard;
INSERT INTO s1.shard VALUES (2, 'after')
"""


def test_a_pipeline_into_iceberg_equals_its_source_after_every_kind_of_change(
    database: Database, mirror: MirrorFactory
) -> None:
    database.execute(_TABLES)
    sink = {"iceberg": {"catalog": new_catalog(), "namespace": "shop", "warehouse": "lake"}}
    made = mirror(
        sink=sink, tables=["public.*", "odd schema.*", {"match": "s?.shard", "into": "public.shards"}]
    )
    made.run_once()
    database.execute(_CHANGES)
    before = made.run_once().position
    made.assert_equal('"odd schema".It\'s', "public.items", "public.nameless", "public.shards")
    # Without Spark's checkpoint and the spool, each table's applied position is in the target.
    shutil.rmtree(made.config.checkpoint)
    shutil.rmtree(made.config.spool)
    database.execute("TRUNCATE items; INSERT INTO items (id, small) VALUES (1, 1)")
    database.execute('DELETE FROM "odd schema"."It\'s" WHERE "the key" = \'-infinity\'')
    order(made.path, ["public.items"], "resync")
    assert made.run_once().position > before
    made.assert_equal('"odd schema".It\'s', "public.items", "public.nameless", "public.shards")
    target = open_targets(made.config).load_target(TableName("public", "items"))
    assert target is not None
    assert not [problem for step in check_places(made.config) for problem in step.problems]
