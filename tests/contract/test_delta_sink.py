"""`DeltaSink` passes the sink rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.contract.delta_harness import DeltaHarness
from tests.support.contract.sink_rules import MirrorRules

pytestmark = pytest.mark.spark


@pytest.fixture
def harness(spark: SparkSession, tmp_path: Path) -> DeltaHarness:
    return DeltaHarness(tmp_path, spark)


class TestRules(MirrorRules):
    pass
