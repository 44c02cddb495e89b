"""Shadows of Iceberg tables: how the rows of one take the place of the table's own, and what former runs left of them goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.errors import SinkError, SinkRefusedError, foreign_reason
from penstock.position import Position
from penstock.sinks.iceberg.state import POSITION
from penstock.sinks.names import quoted


def put_in_place(rows: DataFrame, name: str, properties: Mapping[str, str], position: Position) -> None:
    """Make the table `rows`, with their columns, in one commit. Its snapshots so far stay, and so do properties that are not given."""
    writer = rows.writeTo(name).using("iceberg")
    for key, value in properties.items():
        writer = writer.tableProperty(key, value)
    writer.option(f"snapshot-property.{POSITION}", str(position)).createOrReplace()


def commented(rows: DataFrame, comments: Mapping[str, str]) -> DataFrame:
    """The same rows, with what was said of columns of these names so far."""
    if not comments.keys() & set(rows.columns):
        return rows
    return rows.select(*(_commented(name, comments.get(name)) for name in rows.columns))


def _commented(name: str, comment: str | None) -> Column:
    column = F.col(quoted(name))
    return column if comment is None else column.alias(name, metadata={"comment": comment})


def drop_below(spark: SparkSession, namespace: Sequence[str]) -> None:
    """Drop a namespace with all that is in it, if it is there. What is in its directory besides tables stays, and then it does too."""
    name = ".".join(map(quoted, namespace))
    try:
        inner = [str(row[0]) for row in spark.sql(f"SHOW NAMESPACES IN {name}").collect()]
        tables = [str(row["tableName"]) for row in spark.sql(f"SHOW TABLES IN {name}").collect()]
    except AnalysisException:  # it is not there
        return
    for table in tables:
        spark.sql(f"DROP TABLE IF EXISTS {name}.{quoted(table)} PURGE")
    for each in inner:
        drop_below(spark, (*namespace, each.rpartition(".")[2].strip("`")))
    with suppress(PySparkException):
        spark.sql(f"DROP NAMESPACE {name}")


@contextmanager
def by_spark(doing: str, hint: str = "look at the message") -> Iterator[None]:
    """Turn what Spark says of a statement into an error of ours: what it does not understand will not pass by itself."""
    try:
        yield
    except AnalysisException as error:
        raise SinkRefusedError(f"{doing}: {_first_line(error)}", hint=hint) from error
    except (PySparkException, Py4JJavaError) as error:
        raise SinkError(f"{doing}: {foreign_reason(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
