"""A query worked out on rows that wait in files, each by itself: an error in one of them is that row's, and not the job's.

Every column that is made of others, and the condition, comes back as a struct of one value, which is null where Spark met an error: a text
that is no number, a number too large, a division by zero. The condition filters nothing here. That is for those who know which values of a
row are there at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, SparkSession
from pyspark.sql.classic.column import Column as ClassicColumn
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.errors import SinkError, foreign_reason
from penstock.spark.query import VALUE, WHERE, row_column
from penstock.spark.query_plan import inner, is_plain, private_session, resolve


def answer(spark: SparkSession, text: str, columns: pa.Schema, files: Sequence[str], directory: str) -> None:
    """Work out `text` on rows of `files`, into files of the new `directory`.

    The files that are given have the row's number, and those of `columns` that are needed. Those that are made have the row's number, and
    for each column of the query that is not plain a struct under its place, `0`, `1` …; that of the condition is called `where`.
    """
    number = row_column(columns.names)
    struct = from_arrow_schema(columns.append(pa.field(number, pa.int64())), prefer_timestamp_ntz=True)
    try:
        with private_session(spark) as session:
            rows = session.read.schema(struct).parquet(*files)
            parts = resolve(session, rows.drop(number), text)
            made = [(str(at), each) for at, each in enumerate(parts.columns) if not is_plain(each)]
            if parts.condition is not None:
                made.append((WHERE, parts.condition))
            rows.select(number, *(_tried(session, inner(each)).alias(name) for name, each in made)).write.parquet(directory)
    except (PySparkException, Py4JJavaError) as error:
        raise SinkError(f"Spark could not work out a query: {foreign_reason(error)}") from error


def _tried(session: SparkSession, expression: Any) -> Column:
    """The value in a struct; null, if it could not be had."""
    jvm: Any = session._jvm  # noqa: SLF001 - pyspark's own door to the JVM
    made = jvm.org.apache.spark.sql.catalyst.expressions
    name = session._jsparkSession.sessionState().sqlParser().parseExpression(f"'{VALUE}'")  # noqa: SLF001 - see above
    struct = made.CreateNamedStruct(jvm.PythonUtils.toSeq([name, expression]))
    return ClassicColumn(jvm.org.apache.spark.sql.classic.ExpressionUtils.column(made.TryEval(struct)))
