"""Whole pipelines with modified or removed targets, and with unusual source tables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.pipeline.table_overrides import change_overrides
from penstock.schema import TableName
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database


def test_K09_a_target_altered_dropped_or_restored_by_another_writer_is_not_trusted(
    database: Database, mirror: MirrorFactory
) -> None:
    """A foreign column may stay, dropping a mirrored column is an error, a dropped table is resynced, a
    restored one continues.
    """
    for name in ("added", "taken", "gone", "back"):
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text); INSERT INTO {name} VALUES (1, 'a'), (2, 'a')"
        )
    made = mirror()
    made.run_once()
    for name in ("added", "taken", "gone", "back"):
        database.execute(f"UPDATE {name} SET v = 'b' WHERE id = 1; INSERT INTO {name} VALUES (3, 'b')")
    made.run_once()
    made.damage("public.added", "ALTER TABLE {} ADD COLUMN theirs INT")
    made.damage("public.taken", "ALTER TABLE {} RENAME COLUMN v TO w")
    made.damage("public.back", "RESTORE TABLE {} TO VERSION AS OF 1")
    shutil.rmtree(made.config.sink.root / "public" / "gone")
    for name in ("added", "taken", "gone", "back"):
        database.execute(f"UPDATE {name} SET v = 'c' WHERE id = 2; DELETE FROM {name} WHERE id = 1")
    result = made.run_once()
    assert len(made.rows("public.added")) == 2
    for name, status in result.failed.items():
        assert status.remedy, name
    assert set(result.failed) <= {"public.taken", "public.back"}
    change_overrides(
        made.config.state,
        lambda orders: orders.request_resync([TableName.parse(name) for name in result.failed]),
    )
    assert not made.run_once().failed
    made.assert_equal("public.added", "public.taken", "public.gone", "public.back")


def test_S08_K14_very_wide_very_long_and_oddly_named_tables_arrive_and_new_ones(
    database: Database, mirror: MirrorFactory
) -> None:
    """1,600 columns, the maximum of Postgres; rows of 100 MB; reserved words; names that differ in case only.

    The publication lists every table of the schema separately.
    """
    database.execute(
        "CREATE PUBLICATION everything FOR TABLES IN SCHEMA public WITH (publish_via_partition_root = true)"
    )
    database.execute(
        'CREATE TABLE files (id int PRIMARY KEY); CREATE TABLE "Files" (id int PRIMARY KEY); '
        "INSERT INTO files VALUES (1)"
    )
    columns = ", ".join(f"c{number} int DEFAULT {number}" for number in range(1599))
    database.execute(
        f"CREATE TABLE wide (id int PRIMARY KEY, {columns}); INSERT INTO wide (id) VALUES (1), (2)"
    )
    database.execute(
        "CREATE TABLE long (id int PRIMARY KEY, v text); INSERT INTO long VALUES (1, repeat('x', 100000000))"
    )
    database.execute(
        'CREATE TABLE "select" (id int PRIMARY KEY, "from" text, "where" int); '
        "INSERT INTO \"select\" VALUES (1, 'a', 2)"
    )
    made = mirror(source={"dsn": database.dsn, "publication": "everything"})
    made.run_once()
    database.execute('INSERT INTO "Files" VALUES (1), (2); DELETE FROM files')
    database.execute("CREATE TABLE late (id int PRIMARY KEY); INSERT INTO late VALUES (1), (2)")
    database.execute("UPDATE wide SET c1598 = -1 WHERE id = 2; INSERT INTO wide (id) VALUES (3)")
    database.execute(
        "INSERT INTO long VALUES (2, repeat('y', 100000000)); UPDATE \"select\" SET \"from\" = 'b'"
    )
    assert not made.run_once().failed
    assert sorted(map(tuple, made.rows("public.wide", "id, c0, c1598"))) == [
        (1, 0, 1598),
        (2, 0, -1),
        (3, 0, 1598),
    ]
    assert _lengths(made.config.sink.root / "public" / "long") == [(1, 100_000_000), (2, 100_000_000)]
    assert [tuple(row) for row in made.rows("public.select", "id, `from`, `where`")] == [(1, "b", 2)]
    assert [len(made.rows(f"public.{name}")) for name in ("files", '"Files"', "late")] == [0, 2, 2]


def _lengths(table: Path) -> list[tuple[int, int]]:
    """Without Spark, whose JVM would need a larger heap for such rows than the tests give it.

    Nothing was deleted from the table.
    """
    found = [pq.read_table(file) for file in table.glob("*.parquet")]
    rows = pa.concat_tables([each.rename_columns(["id", "v", "_exact"]) for each in found])
    return sorted(
        zip(rows.column("id").to_pylist(), pc.utf8_length(rows.column("v")).to_pylist(), strict=True)
    )
