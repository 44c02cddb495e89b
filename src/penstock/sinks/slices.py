"""Spooled files as one DataFrame of changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.change import COMMIT_TIMESTAMP, COMMIT_VERSION, ORDINAL, XID, change_schema
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.spool.range import FileSlice


def slices_after(slices: Sequence[FileSlice], position: Position) -> list[FileSlice]:
    """What of `slices` lies after `position`."""
    wanted = [slice for slice in slices if slice.file.max_position > position]
    return [
        replace(slice, after=max(slice.after or position, position)) if slice.file.min_position <= position else slice for slice in wanted
    ]


def load_changes(spark: SparkSession, schema: TableSchema, slices: Sequence[FileSlice]) -> DataFrame:
    """Everything in `slices`, typed by `schema`. Executors read the files; here it is only seen that they are there."""
    struct = from_arrow_schema(change_schema(schema), prefer_timestamp_ntz=True)
    alike: dict[tuple[object, ...], list[FileSlice]] = {}
    for slice in slices:
        alike.setdefault((slice.file.commit_version, slice.after, slice.upto, slice.without), []).append(slice)
    frames = [_narrowed(spark.read.schema(struct).parquet(*(str(slice.path) for slice in group)), group[0]) for group in alike.values()]
    return reduce(DataFrame.unionByName, frames)


def _narrowed(frame: DataFrame, slice: FileSlice) -> DataFrame:
    file = slice.file
    if file.commit_version is None:
        return _without(frame.where(_within(slice)) if slice.needs_filter else frame, slice)
    known = {
        COMMIT_VERSION: F.lit(file.commit_version.value).cast("bigint"),
        COMMIT_TIMESTAMP: F.lit(file.commit_timestamp).cast("timestamp"),
    }
    if file.xid is not None:
        known[XID] = F.lit(file.xid).cast("bigint")
    return _without(frame.withColumns(known), slice)


def _without(frame: DataFrame, slice: FileSlice) -> DataFrame:
    if not slice.without:
        return frame
    names = [f"{version}/{ordinal}" for version, ordinal in slice.without]
    return frame.where(~F.concat_ws("/", COMMIT_VERSION, ORDINAL).isin(names))


def _within(slice: FileSlice) -> Column:
    condition = F.lit(True)
    if slice.after is not None:
        condition &= F.col(COMMIT_VERSION) > slice.after.value
    if slice.upto is not None:
        condition &= F.col(COMMIT_VERSION) <= slice.upto.value
    return condition
