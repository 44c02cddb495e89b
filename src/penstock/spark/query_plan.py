"""What a SELECT over one table comes to, by Spark's own analysis: its columns, what each of them is made of, and what is not for us to run.

A query is worked out row by row, on changes of rows as well as on rows. So nothing may be in it that looks at more than one row, or that
would come to something else when the same row is looked at again: an epoch that is repeated has to make the same rows of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from penstock.errors import ConfigError
from penstock.spark.query import Analysis, Selected

SOURCE = "source"
"""What the table is called in a query."""

_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.ansi.enabled": "true",
    # What two columns have in common would be worked out before either of them is, and its errors would not be those of a row.
    "spark.sql.subexpressionElimination.enabled": "false",
    # A column that is made of another one of the same SELECT is a query over a query.
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
    "Generate": "a function that makes several rows of one",
    "Expand": "several rows of one",
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
_FOREIGN: Final = frozenset({"PythonUDF", "ScalaUDF", "ScalaAggregator", "HiveSimpleUDF", "HiveGenericUDF", "ApplyFunctionExpression"})
_CLOCKS: Final = frozenset({"Now", "LocalTimestamp", "SessionUser"})
_RANDOM: Final = frozenset({"AesEncrypt"})
"""Spark takes it for deterministic, though it draws a new vector for every call."""
_TABLES: Final = frozenset({"UnresolvedRelation", "UnresolvedTableValuedFunction", "UnresolvedInlineTable", "OneRowRelation"})
"""What a query reads from, before it is analysed. Some statements are carried out by the analysis itself."""
_CLOCK_LITERAL = re.compile(r"""['"]\s*(now|today|tomorrow|yesterday)\b""", re.IGNORECASE)
"""In `TIMESTAMP 'now'` and `DATE 'today'`, which are the time of the analysis when it is done."""

_TOO_MUCH: Final = "it is more than columns and a condition over the table `source`"
_AS_WRITTEN: Final = "write it as SELECT … FROM source, with or without WHERE"
_IN_A_VIEW: Final = "make one row of each row of the table here, and the rest in a view over the target"
_IN_THE_SOURCE: Final = "have the source keep it in a column, or let a view over the target add it"
_OF_SPARK: Final = "use functions that Spark has built in, or let a view over the target add it"


_idle: list[SparkSession] = []
"""Sessions that nobody uses at the moment: a new one costs more than most queries."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A query taken apart, as Spark has it."""

    columns: tuple[Any, ...]
    condition: Any | None


def analyse(spark: SparkSession, text: str, columns: pa.Schema) -> Analysis:
    """Of a query over a table with these columns. `ConfigError` says why it cannot be run row by row, or not at all."""
    struct = from_arrow_schema(columns, prefer_timestamp_ntz=True)
    with private_session(spark) as session:
        parts = resolve(session, _empty(session, struct), text)
        asked = None if parts.condition is None else _needs(parts.condition)
        return Analysis(tuple(_selected(each) for each in parts.columns), asked)


@contextmanager
def private_session(spark: SparkSession) -> Iterator[SparkSession]:
    """One with settings and views of its own: queries of several tables are worked out at the same time. It is kept for the next."""
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
    """Not by `createDataFrame` of the session, which would become that of the whole thread."""
    java: Any = session._jsparkSession  # noqa: SLF001 - the session that it stands for
    jvm: Any = session._jvm  # noqa: SLF001 - pyspark's own door to the JVM
    return ClassicDataFrame(java.createDataFrame(jvm.java.util.ArrayList(), java.parseDataType(struct.json())), session)


def resolve(session: SparkSession, frame: DataFrame, text: str) -> Parts:
    """Have Spark analyse a query over `frame`; nothing is run, whatever the text may be."""
    frame.createOrReplaceTempView(SOURCE)
    jvm: Any = session._jvm  # noqa: SLF001 - pyspark's own door to the JVM
    state = session._jsparkSession.sessionState()  # noqa: SLF001 - and to the session that it stands for
    try:
        # Not `parseQuery`, which is content when the text begins like one, and drops what follows.
        parsed = state.sqlParser().parsePlan(text)
        if not all(_kind(leaf) in _TABLES for leaf in _leaves(parsed)):
            _refuse(_TOO_MUCH)
        execution = state.executePlan(parsed, jvm.org.apache.spark.sql.execution.CommandExecutionMode.SKIP())
        execution.assertAnalyzed()
        plan = execution.analyzed()
    except PySparkException as error:
        words = str(error).strip().splitlines()
        _refuse(f"Spark says: {words[0] if words else type(error).__name__}")
    except Py4JJavaError:  # an error of Spark's own, for statements that are no queries
        _refuse(_TOO_MUCH)
    parts = _taken_apart(plan)
    for each in (*parts.columns, *(() if parts.condition is None else (parts.condition,))):
        _check(each)
    return parts


def inner(expression: Any) -> Any:
    """What stands before AS."""
    return expression.child() if _kind(expression) == "Alias" else expression


def is_plain(expression: Any) -> bool:
    return _kind(inner(expression)) == "AttributeReference"


def _taken_apart(plan: Any) -> Parts:
    for node in _above_source(plan):
        if node.nodeName() in _STEPS:
            _refuse(f"it has {_STEPS[node.nodeName()]}, and every row has to be looked at by itself", _IN_A_VIEW)
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
    """Only a view of the session's own is known by a name without more."""
    if plan.nodeName() != "SubqueryAlias" or plan.identifier().name() != SOURCE or plan.identifier().qualifier().size():
        return False
    return bool(plan.child().nodeName() == "View" and plan.child().isTempView())


def _check(expression: Any) -> None:
    for each in _tree(expression):
        kind = _kind(each)
        if kind in _SUBQUERIES:
            _refuse("it has a query within the query, and every row has to be looked at by itself", _IN_A_VIEW)
        if kind in _FOREIGN:
            _refuse(f"{each.prettyName()} is not one of Spark's own functions", _OF_SPARK)
        if kind in _CLOCKS or kind.startswith("Current"):
            _refuse(f"{each.prettyName()} depends on when, or by whom, a row is looked at", _IN_THE_SOURCE)
        if kind == "Literal" and _CLOCK_LITERAL.search(_written(each)):
            _refuse(f"{_written(each)} depends on when a row is looked at", _IN_THE_SOURCE)
        if kind in _RANDOM or (not each.deterministic() and all(below.deterministic() for below in _listed(each.children()))):
            _refuse(f"{each.prettyName()} comes to something else each time", _IN_THE_SOURCE)


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
    """A date or a time as the query has it; nothing of other literals."""
    origin = literal.origin()
    if literal.dataType().typeName() not in ("date", "timestamp", "timestamp_ntz") or not origin.sqlText().isDefined():
        return ""
    return str(origin.sqlText().get())[origin.startIndex().get() : origin.stopIndex().get() + 1]


def _listed(found: Any) -> Iterator[Any]:
    return (found.apply(at) for at in range(found.size()))


def _kind(expression: Any) -> str:
    return str(expression.getClass().getSimpleName())


def _refuse(reason: str, hint: str = _AS_WRITTEN) -> NoReturn:
    raise ConfigError(reason, hint=hint)
