"""Adoption of existing Iceberg tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.errors import TargetForeignError
from penstock.sinks.iceberg.catalog import IcebergCatalog, LoadedTable, active
from tests.support.contract.iceberg_harness import IcebergHarness
from tests.support.contract.sink_harness import ITEMS

THERE = "CREATE TABLE {} (size string COMMENT 'known to many', id bigint NOT NULL) USING iceberg"
MORE = "TBLPROPERTIES ('format-version' = '1', 'theirs' = 'kept')"


@pytest.fixture
def harness(spark: SparkSession, tmp_path: Path) -> IcebergHarness:
    return IcebergHarness(tmp_path, spark)


def _name(harness: IcebergHarness) -> str:
    return f"{harness.place.catalog}.public.items"


def _loaded(harness: IcebergHarness) -> LoadedTable:
    loaded = IcebergCatalog(harness.spark, harness.place.catalog, harness.place.warehouse).load(
        ("public", "items")
    )
    assert loaded is not None
    return loaded


def test_K10_an_adopted_table_keeps_its_rows_until_the_copy_replaces_them_and_stays_marked_as_adopted(
    harness: IcebergHarness,
) -> None:
    spark, main = harness.spark, harness.sink
    spark.sql(f"{THERE.format(_name(harness))} {MORE}")
    spark.sql(f"INSERT INTO {_name(harness)} VALUES ('old', 100)")
    first = _loaded(harness).base.currentSnapshot().snapshotId()
    assert main.adopt(harness.table) is True
    assert harness.target().applied is None
    assert [tuple(row) for row in main.read(ITEMS).collect()] == [("old", 100)]
    shadow = main.shadow("c0ffee")
    harness.sink = shadow
    harness.copy()
    harness.sink = main
    main.replace(ITEMS, shadow, harness.fence)
    assert (harness.rows(), harness.target().applied) == (harness.source.sorted_rows(), harness.fence)
    loaded = _loaded(harness)
    assert (loaded.format_version, loaded.base.properties().get("theirs")) == (2, "kept")
    assert loaded.base.schema().findField("size").doc() == "known to many"
    assert [row["id"] for row in main.read(ITEMS, first).collect()] == [100]


@pytest.mark.parametrize(
    ("columns", "clause", "reason"),
    [
        ("id bigint, extra int", "", "'extra' is not a column of the source"),
        ("id bigint, size int", "", "'size' is int32, and would become string"),
        ("id bigint", "PARTITIONED BY (bucket(4, id))", "has a partition field"),
    ],
)
def test_K10_a_table_that_does_not_fit_is_not_adopted_but_makes_room_where_that_was_said(
    harness: IcebergHarness, columns: str, clause: str, reason: str
) -> None:
    harness.spark.sql(f"CREATE TABLE {_name(harness)} ({columns}) USING iceberg {clause}")
    with pytest.raises(TargetForeignError, match=reason):
        harness.sink.adopt(harness.table)
    with pytest.raises(TargetForeignError):
        harness.sink.load_target(ITEMS)
    harness.sink.remove_foreign(ITEMS)
    assert harness.sink.load_target(ITEMS) is None


def test_K10_a_table_of_another_pipeline_is_adopted_from_it_without_its_position(
    harness: IcebergHarness,
) -> None:
    harness.copy()
    other = harness.open("other")
    with pytest.raises(TargetForeignError, match="'shop'"):
        other.load_target(ITEMS)
    assert other.adopt(harness.table) is True
    target = other.load_target(ITEMS)
    assert target is not None
    assert (target.applied, target.origin) == (None, None)
    assert harness.rows() == harness.source.sorted_rows()
    with pytest.raises(TargetForeignError, match="'other'"):
        harness.sink.load_target(ITEMS)


def test_a_table_with_another_format_version_is_resynced_into_a_new_one(harness: IcebergHarness) -> None:
    harness.copy()
    harness.spark.sql(f"ALTER TABLE {_name(harness)} SET TBLPROPERTIES ('format-version' = '3')")
    harness.sink.release_ownership(ITEMS)
    harness.copy()
    assert (harness.rows(), _loaded(harness).format_version) == (harness.source.sorted_rows(), 3)


def test_a_catalog_is_found_whichever_session_is_active_in_the_thread(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Some operations with another session leave it active, and it does not know the catalog."""
    harness = IcebergHarness(tmp_path, spark)
    with active(spark.newSession()):
        assert (
            IcebergCatalog(spark, harness.place.catalog, harness.place.warehouse).load(("public", "items"))
            is None
        )
