"""Random histories cut into random epochs: after each, the Iceberg table equals the source at that
position.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.schema import TableSchema
from tests.support.sinks.history import BEYOND, ODD, History
from tests.support.sinks.iceberg_lake import open_lake
from tests.support.sinks.mirror import Mirror


@pytest.mark.parametrize(
    ("table", "seed", "truncates"),
    [(ODD, 2, 0.15), (BEYOND, 3, 0.0)],
    ids=["odd names", "keys beyond their type"],
)
def test_after_every_epoch_the_iceberg_table_is_the_source_at_that_position(
    spark: SparkSession, tmp_path: Path, table: TableSchema, seed: int, truncates: float
) -> None:
    history = History(table, seed, groups=30)
    history.run(24, truncates=truncates)
    mirror = Mirror(
        spark, tmp_path, history.source, open_lake(spark, tmp_path, format_version=3 if table is ODD else 2)
    )
    for steps in history.steps():
        mirror.append(steps)
    positions = [each.position for each in history.source.log]
    ends = sorted({*history.random.sample(positions, 2), positions[-1]})
    for end in ends:
        mirror.apply(mirror.reached, end)
        assert mirror.rows() == history.source.states[end], f"after {end} of {ends}"
