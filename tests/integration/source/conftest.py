from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fix_postgres import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.integration.source.stream import ChangeSource

pytest.register_assert_rewrite("tests.integration.source.stream")


@pytest.fixture
def source(spark: SparkSession, database: Database, tmp_path: Path) -> Iterator[ChangeSource]:
    """A table `public.orders`, its publication and its slot, and queries over it that end with the test."""
    from tests.integration.source.stream import ChangeSource

    made = ChangeSource(spark, database, tmp_path)
    yield made
    made.close()
