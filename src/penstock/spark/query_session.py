"""Which Spark is asked what a query means: the one of this process, or, where there is none, one that is started for that alone."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import SparkSession

from penstock.spark.query import Analysis
from penstock.spark.query_plan import analyse
from penstock.spark.session import SHORT_LIVED, build_session

_MOST_ANALYSES: Final = 10_000
_started: list[SparkSession] = []


@lru_cache(maxsize=_MOST_ANALYSES)
def analysed(text: str, columns: tuple[tuple[str, pa.DataType], ...]) -> Analysis:
    """A query over a table with these columns; asked again and again. `ConfigError` if it is not one to be run."""
    return analyse(_session(), text, pa.schema(list(columns)))


def end_started() -> None:
    """Stop Spark, if it was started here."""
    while _started:
        _started.pop().stop()


def _session() -> SparkSession:
    if SparkContext._active_spark_context is not None:  # noqa: SLF001 - there is no other way to ask without starting one
        return SparkSession.builder.getOrCreate()
    session = build_session("penstock-check", master="local[1]", conf=SHORT_LIVED, log=Path(os.devnull))
    _started.append(session)
    return session
