"""Spool files as Spark reads them."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from penstock.sinks.dataframes import load_changes
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.spool.builders import ITEMS, Commit, at, committed, piece, time_of, transactions


def test_X03_rows_written_before_their_commit_get_position_time_and_xid_from_the_manifest(
    spark: SparkSession, tmp_path: Path
) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(transactions(Commit(10, (ITEMS,))))
    writer.append(piece(4_000_000_000, (ITEMS, 0)))
    writer.append(piece(4_000_000_000, (ITEMS, 1), subxid=4_000_000_001))
    writer.append(committed(4_000_000_000, 20))
    slices = SpoolReader(tmp_path).read(at(0), at(20)).tables[ITEMS.name].slices
    rows = load_changes(spark, ITEMS, slices).orderBy("_commit_version", "_ordinal").collect()
    seen = [
        (row["_commit_version"], row["_ordinal"], row["_xid"], row["_commit_timestamp"].timestamp())
        for row in rows
    ]
    assert seen == [
        (10, 0, 7, time_of(10).timestamp()),
        (20, 0, 4_000_000_000, time_of(20).timestamp()),
        (20, 1, 4_000_000_000, time_of(20).timestamp()),
    ]
