"""Trigger.AvailableNow on every Spark: all changes committed before the start, including a snapshot, and then
the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import penstock
from tests.support.source.engine import fold
from tests.support.source.snapshots import BLOCK, current, fill
from tests.support.source.stream import ChangeSource, RunningQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


@pytest.mark.source
@pytest.mark.newest
def test_available_now_takes_the_snapshot_and_earlier_commits_in_bounded_batches_and_ends(
    source: ChangeSource,
) -> None:
    run = RunningQuery(source.checkpoint)

    def write(changes: DataFrame) -> DataStreamWriter:
        return changes.writeStream.foreachBatch(run.take).option("checkpointLocation", str(source.checkpoint))

    fill(source, 600)
    options = {**source.options, **BLOCK, "maxBytesPerBatch": str(2 * 8192)}
    penstock.available_now(source.spark, options, write)
    assert fold(run.rows) == current(source)
    assert len(run.filled) >= 2
    taken = len(run.batches)
    for first in (2000, 2100, 2200):
        source.insert(first, first + 99)
    source.database.execute("DELETE FROM orders WHERE id <= 10")
    penstock.available_now(source.spark, options, write)
    assert fold(run.rows) == current(source)
    assert len(run.batches) > taken
    taken = len(run.rows)
    penstock.available_now(source.spark, options, write)
    assert len(run.rows) == taken
