"""Whole pipelines into Postgres and Parquet; the sinks alone are tested in `tests/contract`."""

from __future__ import annotations

from pyspark.sql import SparkSession

from penstock.cli.table_commands import order
from penstock.pipeline.checks.environment import check_places
from penstock.pipeline.verify.verify import verify_tables
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database

VALUES = """
    CREATE TYPE mood AS ENUM ('calm', 'it''s "odd", \\');
    CREATE TABLE "Odd. names" (
        id int PRIMARY KEY, "a.b" numeric, stamp timestamptz, span interval, list text[][], raw bytea,
          at mood, doc jsonb, price money,
        code char(5), kind "char", bits bit(3), net inet, f float8, r int4range, big text
    );
    INSERT INTO "Odd. names" VALUES
        (1, '1.500', 'infinity', '1 year 2 mons -3 days', '{{a,NULL},{"x,y","\\\\"}}', '\\x00ff', 'calm',
          '{"a": [1.0, null]}', '-12.50',
            'ab', 'x', '101', '10.0.0.1/8', 'NaN', '[1,5)', repeat(md5('1'), 300)),
        (2, 'NaN', '0044-03-15 00:00:00 BC', NULL, '{}', '', 'it''s "odd", \\', '"\\u00e9\\n"', NULL,
            '', '', NULL, NULL, '-0', 'empty', E'tab\\tnew\\nline\\rback\\\\slash \\\\N \\\\.'),
        (3, '-123456789012345678901234567890123456789012345678901234567890.000000000000000000000001000',
          NULL, '0', NULL, NULL, NULL, NULL,
            NULL, NULL, NULL, NULL, NULL, '1e-300', NULL, NULL);
    ALTER TABLE "Odd. names" ALTER big SET STORAGE EXTERNAL
"""
CHANGES = """
    UPDATE "Odd. names" SET "a.b" = '2.50' WHERE id = 1;
    UPDATE "Odd. names" SET id = 4, kind = 'y' WHERE id = 1;
    INSERT INTO "Odd. names"
        SELECT 5, '0.00', '10000-01-01', '1 mon', list, raw, at, doc, price, code, kind, bits, net, 'inf', r,
          big
        FROM "Odd. names" WHERE id = 2;
    DELETE FROM "Odd. names" WHERE id = 3
"""
WHOLE = 'SELECT t::text FROM {}."Odd. names" AS t ORDER BY id'


def test_C06_a_mirror_in_postgres_has_the_exact_text_of_every_value(
    spark: SparkSession, database: Database, target_database: Database, mirror: MirrorFactory
) -> None:
    database.execute(VALUES)
    database.execute("CREATE TABLE plain (id bigint PRIMARY KEY, note text)")
    database.execute(
        "CREATE TABLE kept (id int PRIMARY KEY, note text); INSERT INTO kept VALUES (1, 'one'), (2, 'two')"
    )
    database.execute("INSERT INTO plain SELECT g, 'row ' || g FROM generate_series(1, 100) g")
    made = mirror(
        sink={"postgres": {"dsn": target_database.dsn, "schema_prefix": "copy_"}},
        tables=["public.*", {"table": "public.kept", "mode": "history"}],
    )
    assert [step for step in check_places(made.config) if step.problems] == []
    assert target_database.query("SELECT count(*) FROM pg_namespace WHERE nspname = 'penstock'") == [(0,)]

    made.run_once()
    assert target_database.query(WHOLE.format("copy_public")) == database.query(WHOLE.format("public"))

    database.execute(CHANGES)
    database.execute("DELETE FROM plain WHERE id < 50; UPDATE plain SET note = NULL WHERE id > 90")
    database.execute("UPDATE kept SET note = 'uno' WHERE id = 1; DELETE FROM kept WHERE id = 2")
    database.execute("TRUNCATE plain; INSERT INTO plain VALUES (7, 'last')")
    report = verify_tables(spark, made.config)  # which moves the pipeline to the position of the comparison
    assert report.equal, report
    assert target_database.query(WHOLE.format("copy_public")) == database.query(WHOLE.format("public"))
    assert target_database.query("SELECT * FROM copy_public.plain") == [(7, "last")]
    kept = target_database.query("SELECT id, note, _current FROM copy_public.kept ORDER BY id, _valid_from")
    assert kept == [(1, "one", False), (1, "uno", True), (2, "two", False)]

    # Changes by another writer: one target is repaired in place on request, a dropped one is recreated.
    target_database.execute(
        "CREATE VIEW copy_public.seen AS SELECT note FROM copy_public.plain; "
        "UPDATE copy_public.plain SET note = 'spoiled'"
    )
    target_database.execute("DROP TABLE copy_public.kept")
    order(made.path, ["public.plain"], "resync")
    made.run_once()
    assert target_database.query("SELECT note FROM copy_public.seen") == [("last",)]
    assert target_database.query("SELECT id, note, _current FROM copy_public.kept") == [(1, "uno", True)]


def test_K15_a_log_in_parquet_has_every_change_behind_the_rows_that_were_there(
    spark: SparkSession, database: Database, mirror: MirrorFactory
) -> None:
    database.execute(
        "CREATE TABLE plain (id bigint PRIMARY KEY, size numeric); "
        "INSERT INTO plain VALUES (1, '1.5'), (2, 'NaN')"
    )
    made = mirror(sink={"parquet": {"path": "log"}})
    made.run_once()
    database.execute(
        "UPDATE plain SET size = 7 WHERE id = 1; DELETE FROM plain WHERE id = 2; "
        "INSERT INTO plain VALUES (3, NULL)"
    )
    made.run_once()
    rows = (
        spark.read.parquet(str(made.config.sink.root / "public" / "plain"))
        .orderBy("_commit_version", "_ordinal", "id")
        .collect()
    )
    shown = [
        (row["_change_type"], row["id"], None if row["size"] is None else float(row["size"]), row["_exact"])
        for row in rows
    ]
    assert shown == [
        ("snapshot", 1, 1.5, None),
        ("snapshot", 2, None, {"size": "NaN"}),
        ("update_postimage", 1, 7.0, None),
        ("delete", 2, None, None),
        ("insert", 3, None, None),
    ]
    assert len({row["penstock_position"] for row in rows}) >= 2
