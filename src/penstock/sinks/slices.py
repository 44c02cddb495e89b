"""Spooled files as one DataFrame of changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.change import COMMIT_TIMESTAMP, COMMIT_VERSION, change_schema
from penstock.schema import TableSchema
from penstock.spool.range import FileSlice


def load_changes(spark: SparkSession, schema: TableSchema, slices: Sequence[FileSlice]) -> DataFrame:
    """Everything in `slices`, typed by `schema`. Executors read the files; nothing is opened here."""
    struct = from_arrow_schema(change_schema(schema), prefer_timestamp_ntz=True)
    plain = [str(slice.path) for slice in slices if slice.file.commit_version is None and not slice.needs_filter]
    frames = [spark.read.schema(struct).parquet(*plain)] if plain else []
    for slice in slices:
        if slice.file.commit_version is not None or slice.needs_filter:
            frames.append(_single(spark.read.schema(struct).parquet(str(slice.path)), slice))
    return reduce(DataFrame.unionByName, frames)


def _single(frame: DataFrame, slice: FileSlice) -> DataFrame:
    if slice.file.commit_version is not None:
        return frame.withColumns(
            {
                COMMIT_VERSION: F.lit(slice.file.commit_version.value).cast("bigint"),
                COMMIT_TIMESTAMP: F.lit(slice.file.commit_timestamp).cast("timestamp"),
            }
        )
    return frame.where(_within(slice))


def _within(slice: FileSlice) -> Column:
    condition = F.lit(True)
    if slice.after is not None:
        condition &= F.col(COMMIT_VERSION) > slice.after.value
    if slice.upto is not None:
        condition &= F.col(COMMIT_VERSION) <= slice.upto.value
    return condition
