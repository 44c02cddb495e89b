"""Queries that Spark works out on rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.spark.query_run import answer
from penstock.transforms.asking import Queries
from penstock.transforms.querying import spark_columns
from penstock.transforms.transform import Fitted


@dataclass(frozen=True, slots=True)
class SparkQueries(Queries):
    """Used by several threads of the driver at once."""

    spark: SparkSession

    @override
    def answer(self, fitted: Fitted, files: Sequence[str], directory: str) -> None:
        assert fitted.query is not None, "there is something to ask"
        answer(self.spark, fitted.query.text, pa.schema(list(spark_columns(fitted.source))), files, directory)
