"""`IcebergSink` passes the sink rules. Executors run in this thread; catalog, commits and reader are
Iceberg's: no Spark job.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.contract.iceberg_harness import IcebergHarness
from tests.support.contract.sink_rules import MirrorRules


@pytest.fixture
def harness(spark: SparkSession, tmp_path: Path) -> IcebergHarness:
    return IcebergHarness(tmp_path, spark)


class TestRules(MirrorRules):
    pass
