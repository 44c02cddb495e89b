"""Random histories cut into random epochs: after each, the Delta table equals the source at that position."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.schema import TableSchema
from tests.support.sinks.history import BEYOND, ODD, PLAIN, History
from tests.support.sinks.mirror import Mirror


@pytest.mark.parametrize(
    ("table", "seed", "truncates"),
    [(PLAIN, 1, 0.0), (ODD, 2, 0.0), (BEYOND, 3, 0.0), (PLAIN, 4, 0.15)],
    ids=["plain", "odd names", "keys beyond their type", "with truncates"],
)
def test_after_every_epoch_the_target_is_the_source_at_that_position(
    spark: SparkSession, tmp_path: Path, table: TableSchema, seed: int, truncates: float
) -> None:
    history = History(table, seed, groups=30)
    history.run(24, truncates=truncates)
    mirror = Mirror(spark, tmp_path, history.source)
    for steps in history.steps():
        mirror.append(steps)
    assert mirror.rows() == history.source.states[history.source.fence]
    positions = [each.position for each in history.source.log]
    ends = sorted({*history.random.sample(positions, 3), positions[-1]})
    for end in ends:
        mirror.apply(mirror.reached, end)
        assert mirror.rows() == history.source.states[end], f"after {end} of {ends}"
