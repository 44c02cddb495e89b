"""Adoption of existing Delta tables."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database

pytestmark = pytest.mark.spark


def test_K10_existing_delta_tables_are_refused_adopted_or_replaced_as_configured(
    spark: SparkSession, database: Database, mirror: MirrorFactory
) -> None:
    for name in ("kept", "adopted", "replaced"):
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, note text); "
            f"INSERT INTO {name} VALUES (1, 'one'), (2, 'two')"
        )
    rules = [
        {"match": "public.*"},
        {"table": "public.adopted", "existing": "adopt"},
        {"table": "public.replaced", "existing": "replace"},
    ]
    made = mirror(tables=rules)
    root = made.config.sink.root / "public"
    for name in ("kept", "adopted", "replaced"):
        frame = spark.createDataFrame([(7, "mine")], "id int, note string")
        frame.write.format("delta").option("delta.dataSkippingNumIndexedCols", "1").save(str(root / name))
    result = made.run_once()
    assert {name: (status.reason or "")[:8] for name, status in result.failed.items()} == {
        "public.kept": "PEN-3001"
    }

    assert [tuple(row) for row in made.rows("public.kept")] == [(7, "mine")]
    for name in ("adopted", "replaced"):
        assert sorted(map(tuple, made.rows(f"public.{name}", "id, note"))) == [(1, "one"), (2, "two")]
    first = spark.read.format("delta").option("versionAsOf", 0).load(str(root / "adopted")).collect()
    assert [tuple(row) for row in first] == [(7, "mine")], "its history continues"
    properties = spark.sql(f"SHOW TBLPROPERTIES delta.`{root / 'adopted'}`").collect()
    assert {row["key"]: row["value"] for row in properties}["delta.dataSkippingNumIndexedCols"] == "1"
    assert "delta.dataSkippingNumIndexedCols" not in str(
        spark.sql(f"SHOW TBLPROPERTIES delta.`{root / 'replaced'}`").collect()
    )

    database.execute("UPDATE adopted SET note = 'uno' WHERE id = 1; DELETE FROM replaced WHERE id = 2")
    made.run_once()
    assert sorted(map(tuple, made.rows("public.adopted", "id, note"))) == [(1, "uno"), (2, "two")]
    assert sorted(map(tuple, made.rows("public.replaced", "id, note"))) == [(1, "one")]

    # Targets of another pipeline do not exist for this one, whatever they hold.
    others = mirror(
        pipeline="other", tables=["public.adopted", {"table": "public.replaced", "existing": "refuse"}]
    ).run_once()
    assert {name: (status.reason or "")[:8] for name, status in others.failed.items()} == {
        "public.adopted": "PEN-3001",
        "public.replaced": "PEN-3001",
    }
    assert sorted(map(tuple, made.rows("public.adopted", "id, note"))) == [(1, "uno"), (2, "two")]
