"""Analyse a user's SELECT over one table with Spark (columns, their inputs, unsupported parts), and run it
row by row.

The analysis uses the Spark session of this process, or starts one. Spark evaluates a query on changes as well
as on rows of a snapshot. The result for a row must not depend on other rows, and must be deterministic: a
repeated epoch has to produce the same rows.

Every computed column, and the condition, is returned as a struct with one field. The struct is null if Spark
raised an error, such as invalid text for a number, an overflow or a division by zero. This module does not
apply the condition: only the caller knows which values of a row are available.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.classic.column import Column as ClassicColumn
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from penstock.errors import ConfigError, SinkError
from penstock.foreign import describe
from penstock.spark.query import VALUE, WHERE, Analysis, Selected, row_column
from penstock.spark.session import SHORT_LIVED, build_session

SOURCE = "source"
"""Name of the table in a query."""

_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.ansi.enabled": "true",
    # Spark would evaluate a common subexpression before the columns that use it, so an error in it would not
    # be limited to one row and column.
    "spark.sql.subexpressionElimination.enabled": "false",
    # Spark would turn a column that uses another column of the same SELECT into a nested query.
    "spark.sql.lateralColumnAlias.enableImplicitResolution": "false",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "uncompressed",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}

_STEPS: Final = {
    "Aggregate": "an aggregate",
    "Window": "a window function",
    "Join": "a join",
    "LateralJoin": "a join",
    "AsOfJoin": "a join",
    "Distinct": "DISTINCT",
    "Deduplicate": "DISTINCT",
    "Sort": "ORDER BY",
    "GlobalLimit": "LIMIT",
    "LocalLimit": "LIMIT",
    "Offset": "OFFSET",
    "Tail": "LIMIT",
    "Generate": "a function that returns several rows per row",
    "Expand": "several rows per row",
    "Union": "UNION",
    "Intersect": "INTERSECT",
    "Except": "EXCEPT",
    "Sample": "TABLESAMPLE",
    "WithCTE": "WITH",
    "ScriptTransformation": "TRANSFORM",
    "RepartitionByExpression": "DISTRIBUTE BY",
    "OneRowRelation": "no table",
    "LocalRelation": "VALUES",
}
_SUBQUERIES: Final = frozenset({"ScalarSubquery", "Exists", "InSubquery", "ListQuery", "LateralSubquery"})
_FOREIGN: Final = frozenset(
    {"PythonUDF", "ScalaUDF", "ScalaAggregator", "HiveSimpleUDF", "HiveGenericUDF", "ApplyFunctionExpression"}
)
_CLOCKS: Final = frozenset({"Now", "LocalTimestamp", "SessionUser"})
_RANDOM: Final = frozenset({"AesEncrypt"})
"""Functions that Spark considers deterministic, although they are not: `aes_encrypt` uses a new
initialization vector for every call.
"""
_TABLES: Final = frozenset(
    {"UnresolvedRelation", "UnresolvedTableValuedFunction", "UnresolvedInlineTable", "OneRowRelation"}
)
"""Leaves that the plan of a parsed query may have before analysis. Statements with other leaves are rejected,
since Spark may execute them during the analysis.
"""
_CLOCK_LITERAL = re.compile(r"""['"]\s*(now|today|tomorrow|yesterday)\b""", re.IGNORECASE)
"""Matches `TIMESTAMP 'now'` and `DATE 'today'`, which Spark resolves to the time of the analysis."""

_TOO_MUCH: Final = "it is more than columns and a condition over the table `source`"
_AS_WRITTEN: Final = "write it as SELECT … FROM source, with or without WHERE"
_IN_A_VIEW: Final = "return one row per row of the table, and do the rest in a view over the target"
_IN_THE_SOURCE: Final = "store it in a column of the source table, or add it in a view over the target"
_OF_SPARK: Final = "use Spark's built-in functions, or add it in a view over the target"


_idle: list[SparkSession] = []
"""Sessions that are kept for reuse, because creating one costs more than most queries."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parsed parts of a query."""

    columns: tuple[Any, ...]
    condition: Any | None


def analyse(spark: SparkSession, text: str, columns: pa.Schema) -> Analysis:
    """Analyse a query over a table with these columns. Raises `ConfigError` with the reason if it cannot be
    run row by row, or is not valid.
    """
    struct = from_arrow_schema(columns, prefer_timestamp_ntz=True)
    with private_session(spark) as session:
        parts = resolve(session, _empty(session, struct), text)
        condition_columns = None if parts.condition is None else _needs(parts.condition)
        return Analysis(tuple(_selected(each) for each in parts.columns), condition_columns)


@contextmanager
def private_session(spark: SparkSession) -> Iterator[SparkSession]:
    """A session with its own settings and views, because queries of several tables run concurrently. The
    session is kept for reuse.
    """
    session = _taken(spark)
    try:
        yield session
    finally:
        _idle.append(session)


def _taken(spark: SparkSession) -> SparkSession:
    while _idle:
        session = _idle.pop()
        if session.sparkContext is spark.sparkContext:
            return session
    session = spark.newSession()
    for name, value in _SETTINGS.items():
        session.conf.set(name, value)
    return session


def _empty(session: SparkSession, struct: StructType) -> DataFrame:
    """An empty frame with this schema. It is created in the JVM, because `session.createDataFrame` would make
    `session` the active one of the thread.
    """
    java: Any = session._jsparkSession  # noqa: SLF001 - the JVM's session
    jvm: Any = session._jvm  # noqa: SLF001 - pyspark's access to the JVM
    return ClassicDataFrame(
        java.createDataFrame(jvm.java.util.ArrayList(), java.parseDataType(struct.json())), session
    )


def resolve(session: SparkSession, frame: DataFrame, text: str) -> Parts:
    """Have Spark analyse a query over `frame`.

    The text is never executed, even if it is a statement other than a query.
    """
    frame.createOrReplaceTempView(SOURCE)
    jvm: Any = session._jvm  # noqa: SLF001 - pyspark's access to the JVM
    state = session._jsparkSession.sessionState()  # noqa: SLF001 - the JVM's session
    try:
        # `parseQuery` would accept a query that is followed by other text, and ignore that text.
        parsed = state.sqlParser().parsePlan(text)
        if not all(_kind(leaf) in _TABLES for leaf in _leaves(parsed)):
            _refuse(_TOO_MUCH)
        execution = state.executePlan(parsed, jvm.org.apache.spark.sql.execution.CommandExecutionMode.SKIP())
        execution.assertAnalyzed()
        plan = execution.analyzed()
    except PySparkException as error:
        words = str(error).strip().splitlines()
        _refuse(f"Spark says: {words[0] if words else type(error).__name__}")
    except Py4JJavaError:  # internal error of Spark for statements that are not queries
        _refuse(_TOO_MUCH)
    parts = _taken_apart(plan)
    for each in (*parts.columns, *(() if parts.condition is None else (parts.condition,))):
        _check(each)
    return parts


def inner(expression: Any) -> Any:
    """The expression before AS."""
    return expression.child() if _kind(expression) == "Alias" else expression


def is_plain(expression: Any) -> bool:
    return _kind(inner(expression)) == "AttributeReference"


def _taken_apart(plan: Any) -> Parts:
    for node in _above_source(plan):
        if node.nodeName() in _STEPS:
            _refuse(f"it has {_STEPS[node.nodeName()]}, but a query is evaluated row by row", _IN_A_VIEW)
    top, below, condition = plan, None, None
    if top.nodeName() == "Project":
        below = top.child()
        if below.nodeName() == "Filter":
            condition, below = below.condition(), below.child()
        while below.nodeName() == "SubqueryAlias" and not _is_source(below):
            below = below.child()
    if below is None or not _is_source(below):
        _refuse(_TOO_MUCH)
    return Parts(tuple(_listed(top.projectList())), condition)


def _above_source(plan: Any) -> Iterator[Any]:
    if _is_source(plan):
        return
    yield plan
    for child in _listed(plan.children()):
        yield from _above_source(child)


def _is_source(plan: Any) -> bool:
    """Whether the node is the session's temporary view. Only temporary views have an unqualified name."""
    if (
        plan.nodeName() != "SubqueryAlias"
        or plan.identifier().name() != SOURCE
        or plan.identifier().qualifier().size()
    ):
        return False
    return bool(plan.child().nodeName() == "View" and plan.child().isTempView())


def _check(expression: Any) -> None:
    for each in _tree(expression):
        kind = _kind(each)
        if kind in _SUBQUERIES:
            _refuse("it has a subquery, but a query is evaluated row by row", _IN_A_VIEW)
        if kind in _FOREIGN:
            _refuse(f"{each.prettyName()} is not a built-in function of Spark", _OF_SPARK)
        if kind in _CLOCKS or kind.startswith("Current"):
            _refuse(f"{each.prettyName()} depends on when, or by which user, it is evaluated", _IN_THE_SOURCE)
        if kind == "Literal" and _CLOCK_LITERAL.search(_written(each)):
            _refuse(f"{_written(each)} depends on when it is evaluated", _IN_THE_SOURCE)
        if kind in _RANDOM or (
            not each.deterministic() and all(below.deterministic() for below in _listed(each.children()))
        ):
            _refuse(f"{each.prettyName()} is not deterministic", _IN_THE_SOURCE)


def _selected(expression: Any) -> Selected:
    found = inner(expression)
    return Selected(expression.name(), expression.dataType().json(), _needs(found), is_plain(expression))


def _needs(expression: Any) -> tuple[str, ...]:
    return tuple(sorted({each.name() for each in _listed(expression.references().toSeq())}))


def _tree(expression: Any) -> Iterator[Any]:
    yield expression
    for child in _listed(expression.children()):
        yield from _tree(child)


def _leaves(plan: Any) -> Iterator[Any]:
    children = list(_listed(plan.children()))
    for child in children:
        yield from _leaves(child)
    if not children:
        yield plan


def _written(literal: Any) -> str:
    """The text of a date or time literal in the query; empty for other literals."""
    origin = literal.origin()
    if (
        literal.dataType().typeName() not in ("date", "timestamp", "timestamp_ntz")
        or not origin.sqlText().isDefined()
    ):
        return ""
    return str(origin.sqlText().get())[origin.startIndex().get() : origin.stopIndex().get() + 1]


def _listed(found: Any) -> Iterator[Any]:
    return (found.apply(at) for at in range(found.size()))


def _kind(expression: Any) -> str:
    return str(expression.getClass().getSimpleName())


def _refuse(reason: str, hint: str = _AS_WRITTEN) -> NoReturn:
    raise ConfigError(reason, hint=hint)


def answer(spark: SparkSession, text: str, columns: pa.Schema, files: Sequence[str], directory: str) -> None:
    """Evaluate `text` on the rows of `files`, and write the results to files in the new `directory`.

    The input files have the row number and those columns of `columns` that the query needs. The output files
    have the row number and one struct column for each computed column, named by its index in the query (`0`,
    `1` …). If the query has a condition, they also have a struct column named `where`.
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
            rows.select(
                number, *(_tried(session, inner(each)).alias(name) for name, each in made)
            ).write.parquet(directory)
    except (PySparkException, Py4JJavaError) as error:
        raise SinkError(f"Spark could not evaluate a query: {describe(error)}") from error


def _tried(session: SparkSession, expression: Any) -> Column:
    """A column with the value of `expression` in a struct. The struct is null if the evaluation failed."""
    jvm: Any = session._jvm  # noqa: SLF001 - pyspark's access to the JVM
    made = jvm.org.apache.spark.sql.catalyst.expressions
    name = session._jsparkSession.sessionState().sqlParser().parseExpression(f"'{VALUE}'")  # noqa: SLF001 - see above
    struct = made.CreateNamedStruct(jvm.PythonUtils.toSeq([name, expression]))
    return ClassicColumn(jvm.org.apache.spark.sql.classic.ExpressionUtils.column(made.TryEval(struct)))


_MOST_ANALYSES: Final = 10_000
_started: list[SparkSession] = []


@lru_cache(maxsize=_MOST_ANALYSES)
def analysed(text: str, columns: tuple[tuple[str, pa.DataType], ...]) -> Analysis:
    """Cached analysis of a query over a table with these columns.

    Raises `ConfigError` if it cannot be run.
    """
    return analyse(_session(), text, pa.schema(list(columns)))


def end_started() -> None:
    """Stop the session if this module started it."""
    while _started:
        _started.pop().stop()


def _session() -> SparkSession:
    if SparkContext._active_spark_context is not None:  # noqa: SLF001 - the only check that does not start a session
        return SparkSession.builder.getOrCreate()
    session = build_session("penstock-check", master="local[1]", conf=SHORT_LIVED, log=Path(os.devnull))
    _started.append(session)
    return session
