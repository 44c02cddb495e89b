"""Catching up and ending, on every version of Spark.

`Trigger.AvailableNow` does it by itself from Spark 4.2 on. Spark 4.1 runs exactly one batch of a Python source under that trigger, and
after a crash only the one that had failed; so there it is run again until a run finds nothing new up to where the source stood at first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.postgres.connection import connect
from penstock.postgres.slot import current_position
from penstock.spark.request import SourceRequest

FORMAT = "postgres-cdc"


def available_now(spark: SparkSession, options: Mapping[str, str], write: Callable[[DataFrame], DataStreamWriter]) -> StreamingQuery:
    """Read everything that had committed when this was called, in batches as large as the options allow, and end; gives the last query.

    `write` is given the stream and returns its writer, with its sink and checkpoint and without a trigger. It is called once for each run.
    Raises what a query ends with. The program that calls it must reach the source itself, on Spark 4.1.
    """
    is_once_enough = tuple(map(int, spark.version.split(".")[:2])) >= (4, 2)
    chosen = dict(options) if is_once_enough else {**options, "endingPosition": _now(options)}
    while True:
        stream = spark.readStream.format(FORMAT).options(**chosen).load()
        query = write(stream).trigger(availableNow=True).start()
        query.awaitTermination()
        if is_once_enough or not any(_has_moved(progress) for progress in query.recentProgress):
            return query


def _now(options: Mapping[str, str]) -> str:
    with connect(SourceRequest.parse(options).capture().address) as connection:
        return str(current_position(connection))


def _has_moved(progress: Any) -> bool:
    """Whether a batch took in anything of ours. The query may read other sources too, in any order, and such that never rest."""
    ours = [source for source in progress["sources"] if "position" in str(source["endOffset"])]
    return any(source["startOffset"] != source["endOffset"] for source in ours)
