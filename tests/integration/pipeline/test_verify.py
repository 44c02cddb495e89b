"""`penstock verify` on a stopped pipeline: every kind of difference, and tables that cannot be compared.

PENSTOCK_TEST_VERIFY_ROUNDS sets the number of rounds. `make test-verify` sets it high.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from penstock.errors import NoTablesError
from penstock.pipeline.table_states import TableState
from penstock.pipeline.verify.verify import TableVerdict, VerifyReport, verify_tables
from penstock.schema import TableName
from penstock.storage.temporary import scratch_directory
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database

ROWS = int(os.environ.get("PENSTOCK_TEST_VERIFY_ROWS", "30000"))


def _explained(report: VerifyReport) -> str:
    return json.dumps(report.as_document(), indent=1)


def _verdict(report: VerifyReport, table: str) -> TableVerdict:
    return next(each for each in report.verdicts if str(each.table) == table)


@pytest.mark.timeout(900)
def test_a_stopped_pipeline_is_brought_to_the_snapshot_and_every_difference_is_found(
    database: Database, mirror: MirrorFactory, spark: SparkSession
) -> None:
    database.execute("CREATE TABLE big (id int PRIMARY KEY, v text, f float8, n numeric, m text[])")
    database.execute(
        "INSERT INTO big SELECT g, 'v' || g, g / 7.0, g, ARRAY[g::text, NULL] "
        f"FROM generate_series(1, {ROWS}) g"
    )
    database.execute(
        "INSERT INTO big VALUES (-1, '', 'NaN', 'NaN', '{}'), (-2, NULL, '-0', 'Infinity', NULL)"
    )
    database.execute("CREATE TABLE other (id int PRIMARY KEY)")
    both = mirror()
    both.run_once()
    database.execute(
        "UPDATE big SET v = 'changed' WHERE id <= 100; DELETE FROM big WHERE id = 200; "
        "INSERT INTO other VALUES (1)"
    )
    report = verify_tables(spark, both.config)
    assert report.equal, _explained(report)
    assert [each.comparison and each.comparison.source_rows for each in report.verdicts] == [ROWS + 1, 1]
    _alter(spark, both.config.sink.root / "public" / "big")
    started = time.monotonic()
    report = verify_tables(spark, both.config, [TableName("public", "big")])
    print(f"verified {ROWS:,} rows in {time.monotonic() - started:.1f} s")
    assert [str(each.table) for each in report.verdicts] == ["public.big"]
    assert not report.equal
    assert _differences(report) == [
        (
            "different",
            {"id": "-2"},
            [("f", "-0.0", "0.0"), ("_exact", '{"n":"Infinity"}', '{"n":"-Infinity"}')],
        ),
        ("different", {"id": "303"}, [("m", '["303",null]', '[null,"303"]')]),
        ("different", {"id": str(ROWS)}, [("v", f"v{ROWS}", "altered")]),
        ("extra", {"id": "-5"}, []),
        ("extra", {"id": "301"}, []),
        ("missing", {"id": "300"}, []),
    ]
    with pytest.raises(NoTablesError, match=r"does not select public\.none"):
        verify_tables(spark, mirror(tables=["public.big"]).config, [TableName("public", "none")])


def _alter(spark: SparkSession, path: Path) -> None:
    """Another writer's commit: a row is deleted, one doubled, one added, and values change in three."""
    rows = spark.read.format("delta").load(str(path)).where("id <> 300")
    added = rows.where("id IN (301, 302)").withColumn("id", F.expr("if(id = 302, -5, id)"))
    altered = {
        "v": f"if(id = {ROWS}, 'altered', v)",
        "f": "if(id = -2, 0D, f)",
        "m": "if(id = 303, array(NULL, '303'), m)",
        "_exact": "if(id = -2, map('n', '-Infinity'), _exact)",
    }
    changed = rows.withColumns({name: F.expr(text) for name, text in altered.items()})
    changed.unionAll(added).write.format("delta").mode("overwrite").save(str(path))


def _differences(
    report: VerifyReport,
) -> list[tuple[str, dict[str, str | None], list[tuple[str, str | None, str | None]]]]:
    compared = [each.comparison for each in report.verdicts if each.comparison is not None]
    return [
        (row.kind, row.key, [(each.column, each.source, each.target) for each in row.columns])
        for found in compared
        for row in found.examples
    ]


def test_a_failed_table_is_reported_and_not_equal(
    database: Database, mirror: MirrorFactory, spark: SparkSession
) -> None:
    database.execute(
        "CREATE TABLE good (id int PRIMARY KEY, v text); CREATE TABLE bad (id int PRIMARY KEY, v text)"
    )
    database.execute("INSERT INTO good VALUES (1, 'one'); INSERT INTO bad VALUES (1, 'one')")
    both = mirror(schema_changes="stop")
    both.run_once()
    database.execute(
        "ALTER TABLE bad ADD more int; INSERT INTO bad VALUES (2, 'two', 2); "
        "INSERT INTO good VALUES (2, 'two')"
    )
    report = verify_tables(spark, both.config)
    assert not report.equal
    good, bad = _verdict(report, "public.good"), _verdict(report, "public.bad")
    assert good.equal
    assert (bad.state, bad.comparison, bad.equal) == (TableState.FAILED, None, False)
    assert bad.reason is not None
    assert "PEN-1403" in bad.reason
    assert bad.remedy
    assert verify_tables(spark, both.config, [TableName("public", "good")]).equal


def test_files_of_a_killed_verify_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "lock").touch()
    (tmp_path / "dead" / "rows.parquet").touch()
    with scratch_directory(tmp_path) as one:
        assert not (tmp_path / "dead").exists()
        with scratch_directory(tmp_path) as other:
            assert one.is_dir()
            assert other.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
