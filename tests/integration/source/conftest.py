from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.fix_postgres import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.source.engine import LocalSource
    from tests.support.source.stream import ChangeSource

pytest.register_assert_rewrite("tests.support.source.stream", "tests.support.source.engine")


@pytest.fixture
def source(spark: SparkSession, database: Database, tmp_path: Path) -> Iterator[ChangeSource]:
    """A table `public.orders`, its publication and its slot, and queries over it that end with the test."""
    from tests.support.source.stream import ChangeSource

    made = ChangeSource(spark, database, tmp_path)
    yield made
    made.close()


@pytest.fixture
def local(database: Database, tmp_path: Path) -> Iterator[LocalSource]:
    """A table `public.orders`, and queries over it that run in this process, without Spark."""
    from tests.support.source.engine import LocalSource

    # A reader takes the signal by which Spark ends its process.
    ending = signal.getsignal(signal.SIGTERM)
    yield LocalSource(database, tmp_path)
    signal.signal(signal.SIGTERM, ending)
