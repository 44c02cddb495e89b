"""Apply epochs with Spark's MERGE to Delta tables with features that Penstock's own commits do not support.

An epoch of inserts is an append, an epoch that empties the table is one overwrite, any other epoch is one
MERGE. The session writes the position with each of these commits. This module also reduces the changes of an
epoch, in Spark SQL. It is the only such reduction besides `fold`.

`collapse` reduces changes, ordered by `(_commit_version, _ordinal)`, to one row per key with these columns:

- `value_<i>`: the new value of column number i. The table's own column names are not used, because they could
  conflict with the following names;
- `_exact`: the exact texts of the new values;
- `_op`: `delete` or `upsert`;
- `_there`: whether the target had the row before the epoch, under the key in the next columns;
- `match_<j>` for each key column, and `match_text_<j>` for key columns whose exact value may be a text (see
  `may_be_text`);
- `_commit_version` and `_ordinal` of the last change;
- `_kept`: names of the columns whose value in the target stays; null if there are none.

`match_<j>` has the key itself, except after a key change with an unchanged TOAST value. Only the row with the
old key has that value. So MERGE finds that row by its old key and updates it, including the key, instead of
deleting a row and inserting another.

For that, changes are grouped by *chain* instead of by key. A chain begins with an insert, or with the first
change to a row of the target. But the insert of a key change with unchanged values continues the chain of the
delete right before it. A chain is identified by the position and ordinal of its first change. Within a chain,
an unchanged value is the last value that was sent. If none was sent, the target keeps its value.

MERGE stops at the first row that a constraint of the table rejects. `find_rejected` evaluates the constraints
on the rows that MERGE would write, to find all rejected rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, Window, WindowSpec
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, EXACT, ORDINAL, UNCHANGED, ChangeCounts, ChangeType
from penstock.errors import SinkError, SinkRefusedError, TargetRewoundError, ValuesRefusedError, parse_error
from penstock.position import Position
from penstock.sinks.base import ChangedRows, Target
from penstock.sinks.dataframes import quoted, text_literal
from penstock.sinks.delta.log import has_moved
from penstock.sinks.delta.state import CONSTRAINT, Metadata
from penstock.sinks.executors import penstock_error
from penstock.sinks.repair_files import match_column, match_text_column, row_schema, value_column

OP = "_op"
KEPT = "_kept"
THERE = "_there"
DELETE = "delete"
UPSERT = "upsert"

_CHAIN_VERSION, _CHAIN_ORDINAL = "chain_version", "chain_ordinal"
_BROADCAST_EDGES = 100_000

_ROW = ("22001", "22003", "23")
"""SQLSTATEs, or their prefixes, that mean that a value does not fit its column or violates a constraint."""
_TABLE = ("0A", "42809", "56038")
"""SQLSTATEs that mean that the table rejects this kind of write: it is append-only, or requires features that
this Delta version lacks.
"""
_NAMES = ("constraintName", "columnName")
"""The message parameters that may be shown. All others are values."""


class DeltaSessions:
    """One session per table, since the transaction id is a session setting. Used by several threads."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._sessions: dict[str, SparkSession] = {}
        self._lock = threading.Lock()

    def at(self, application: str, position: Position) -> SparkSession:
        """The table's session, which writes `position` with its next commit."""
        with self._lock:
            if application not in self._sessions:
                self._sessions[application] = self._spark.newSession()
            session = self._sessions[application]
        session.conf.set("spark.databricks.delta.write.txnAppId", application)
        session.conf.set("spark.databricks.delta.write.txnVersion", str(position.value))
        return session


@contextmanager
def translated_errors(path: Path, doing: str) -> Iterator[None]:
    """Convert Spark errors about the table at `path` to Penstock errors."""
    try:
        yield
    except AnalysisException as error:
        hint = (
            f"fix the cause in the message, or remove {path} and restart the pipeline to copy the table again"
        )
        raise SinkRefusedError(f"{doing} {path}: {first_line(error)}", hint=hint) from error
    except (PySparkException, Py4JJavaError) as error:
        found = parse_error(str(error))
        if isinstance(found, SinkError):
            raise type(found)(
                f"{doing} {path}: {found.message}",
                hint=f"remove {path} and restart the pipeline to copy the table again",
            ) from error
        state, what = _find_refusal(error)
        if state.startswith(_ROW):
            hint = (
                f"ALTER TABLE delta.`{path}` DROP CONSTRAINT …, or correct the row in the source; "
                "then penstock tables resync CONFIG TABLE; "
                "or set refused: dead_letters, which moves such rows to the dead-letter queue"
            )
            raise ValuesRefusedError(f"{doing} {path}: a row is rejected: {what}", hint=hint) from None
        if state.startswith(_TABLE):
            hint = (
                f"remove the cause from the table, or remove {path} and restart the pipeline to copy it again"
            )
            raise SinkRefusedError(f"{doing} {path}: {what}", hint=hint) from error
        raise penstock_error(error, SinkError, f"{doing} {path}") from error


def _is_about_rows_or_table(state: str, error_class: str) -> bool:
    """Whether a row or the table rejects the write. Errors that wrap those of tasks do not count, and neither
    do Delta's version conflicts, which use the SQLSTATE of numeric overflow.
    """
    return state.startswith((*_ROW, *_TABLE)) and not (state == "22003" and error_class.startswith("DELTA_"))


def _find_refusal(error: BaseException) -> tuple[str, str]:
    """The SQLSTATE of Delta's error and the violated rule; both are empty if there is no such error. The
    error's message is not used, because it quotes the row.
    """
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while java is not None:
        try:
            state, parameters = java.getSqlState(), java.getMessageParameters()
            names = [str(parameters.get(name)) for name in _NAMES if parameters.get(name) is not None]
            if state is not None and _is_about_rows_or_table(str(state), str(java.getErrorClass())):
                return str(state), " ".join([str(java.getErrorClass()), *names])
        except Py4JError:
            pass  # a Java exception without these methods
        java = java.getCause()
    return "", ""


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


_MISSING = text_literal(
    f"{TargetRewoundError.code}: a row that was copied or applied before is no longer in the target"
)


VIEW = "penstock_changes"


def check_not_moved(changes: DataFrame, path: Path, application: str, version: int) -> DataFrame:
    """Return `changes`, whose reading fails if this pipeline has committed to the table after `version`.

    Delta itself detects commits after its transaction began. But a commit between `version` and that time
    could have inserted rows of `changes`, and Delta would insert them again.
    """

    checked: list[bool] = []

    def is_wanted(_: int) -> bool:
        if not checked and has_moved(path, application, version):
            raise SinkError("another run of the pipeline is writing to it")
        checked[:] = [True]
        return True

    return changes.where(F.udf(is_wanted, "boolean", useArrow=False)(COMMIT_VERSION))


def merge_changes(
    session: SparkSession,
    place: str,
    target: Target,
    changes: DataFrame,
    counts: ChangeCounts,
    *,
    may_append: bool = True,
) -> None:
    """Apply `changes` to the Delta table at `place`."""
    emptied = last_truncate(changes) if counts.truncates else None
    if emptied is not None:
        rest = collapse(after(changes, emptied), target.schema, target.key, counts).where(
            f"{OP} <> '{DELETE}'"
        )
        values = [F.col(value_column(index)).alias(name) for index, name in enumerate(target.schema.names)]
        rest.select(*values, EXACT).write.format("delta").mode("overwrite").save(place)
    elif may_append and not (counts.updates or counts.deletes or counts.moves):
        # An insert never conflicts with a row of the target: right before the insert, the target equals the
        # source, whose keys are unique.
        rows = changes.select(*(quoted(name) for name in target.schema.names), EXACT)
        rows.write.format("delta").mode("append").save(place)
    else:
        collapse(changes, target.schema, target.key, counts).createOrReplaceTempView(VIEW)
        session.sql(
            merge_statement(place, VIEW, target.schema, target.key, keeps=counts.unchanged > 0)
        ).collect()


def merge_statement(place: str, view: str, schema: pa.Schema, key: Sequence[str], *, keeps: bool) -> str:
    """Return the statement that merges `view`, the result of `collapse`, into the Delta table at `place`.
    `keeps`: some rows keep values of the target.
    """
    kept = {name for name in schema.names if keeps and name not in key}
    values = {name: f"s.{value_column(index)}" for index, name in enumerate(schema.names)}
    updates = [
        f"t.{quoted(name)} = {_updated(name, value) if name in kept else value}"
        for name, value in values.items()
    ]
    updates.append(f"t.{quoted(EXACT)} = {_exact(keeps)}")
    inserts = [_inserted(name, value) if name in kept else value for name, value in values.items()]
    names = ", ".join(quoted(name) for name in (*schema.names, EXACT))
    clauses = [
        f"MERGE INTO delta.{quoted(place)} t USING {view} s",
        f"ON {_condition(schema, key)}",
        f"WHEN MATCHED AND s.{OP} = '{DELETE}' THEN DELETE",
        f"WHEN MATCHED THEN UPDATE SET {', '.join(updates)}",
        f"WHEN NOT MATCHED AND s.{OP} <> '{DELETE}' THEN INSERT ({names})",
        f"VALUES ({', '.join(inserts)}, s.{quoted(EXACT)})",
    ]
    return " ".join(clauses)


def merged_rows(
    place: str, view: str, schema: pa.Schema, key: Sequence[str], *, keeps: bool, is_emptied: bool
) -> str:
    """Return a query for the rows that MERGE would write, with the positions of their last changes."""
    kept = {name for name in schema.names if keeps and name not in key}
    values = {name: f"s.{value_column(index)}" for index, name in enumerate(schema.names)}
    columns = [
        f"{_updated(name, value) if name in kept else value} AS {quoted(name)}"
        for name, value in values.items()
    ]
    columns += [f"{_exact(keeps)} AS {quoted(EXACT)}", f"s.{COMMIT_VERSION}", f"s.{ORDINAL}"]
    met = "false" if is_emptied else _condition(schema, key)
    return " ".join(
        [f"SELECT {', '.join(columns)}", f"FROM {view} s", f"LEFT JOIN delta.{quoted(place)} t ON {met}"]
    )


def replace_statement(place: str, view: str, schema: pa.Schema, key: Sequence[str]) -> str:
    """Return the statement that deletes all rows of the table at `place` that match a row of `view` with
    `_there`, and inserts the other rows of `view`.
    """
    names = ", ".join(quoted(name) for name in (*schema.names, EXACT))
    values = ", ".join(f"s.{value_column(index)}" for index in range(len(schema.names)))
    clauses = [
        f"MERGE INTO delta.{quoted(place)} t USING {view} s",
        f"ON {_condition(schema, key)}",
        "WHEN MATCHED THEN DELETE",
        f"WHEN NOT MATCHED AND NOT s.{THERE} THEN INSERT ({names})",
        f"VALUES ({values}, s.{quoted(EXACT)})",
    ]
    return " ".join(clauses)


def _condition(schema: pa.Schema, key: Sequence[str]) -> str:
    """The join condition. A key is null only if its type cannot hold it; then the texts must be equal."""
    if not key:
        raise SinkRefusedError(
            "cannot MERGE into a table without a key", hint="give the table a primary key, and resync it"
        )
    parts = []
    for at, name in enumerate(key):
        if may_be_text(schema.field(name).type):
            parts.append(f"t.{quoted(name)} <=> s.{match_column(at)}")
            parts.append(f"t.{quoted(EXACT)}[{text_literal(name)}] <=> s.{match_text_column(at)}")
        else:
            parts.append(f"t.{quoted(name)} = s.{match_column(at)}")
    return " AND ".join([*parts, f"s.{THERE}"])


def _is_kept(name: str) -> str:
    return f"array_contains(s.{KEPT}, {text_literal(name)})"


def _updated(name: str, value: str) -> str:
    return f"CASE WHEN {_is_kept(name)} THEN t.{quoted(name)} ELSE {value} END"


def _inserted(name: str, value: str) -> str:
    """Return the SQL expression for a value of an inserted row. It raises an error for a value that only the
    target could have, because that value must not become NULL.
    """
    return f"CASE WHEN {_is_kept(name)} THEN raise_error({_MISSING}) ELSE {value} END"


def _exact(keeps: bool) -> str:
    """Return the SQL expression for `_exact`. Kept values keep their exact texts."""
    exact = quoted(EXACT)
    if not keeps:
        return f"s.{exact}"
    stay = f"map_filter(coalesce(t.{exact}, map()), (k, v) -> array_contains(s.{KEPT}, k))"
    whole = f"map_concat({stay}, coalesce(s.{exact}, map()))"
    return f"CASE WHEN s.{KEPT} IS NULL THEN s.{exact} WHEN size({whole}) > 0 THEN {whole} END"


Refused = dict[tuple[int, int], str]
"""The violated rule, by commit version and ordinal."""

_BROKEN = "penstock_broken"


def rules(metadata: Metadata) -> Mapping[str, str]:
    """The conditions that every row must meet, by name."""
    checks = {
        name.removeprefix(CONSTRAINT): text
        for name, text in metadata.properties.items()
        if name.startswith(CONSTRAINT)
    }
    present = {
        f"{field['name']} NOT NULL": f"{quoted(field['name'])} IS NOT NULL"
        for field in metadata.fields
        if not field["nullable"]
    }
    return {**checks, **present}


def find_rejected(
    session: SparkSession,
    place: str,
    target: Target,
    changes: DataFrame,
    *,
    counts: ChangeCounts,
    metadata: Metadata,
) -> Refused:
    """The changes that violate a rule. Writes nothing. If a rule uses a column that only the target has, no
    change is found, and the table fails.
    """
    emptied = last_truncate(changes) if counts.truncates else None
    rest = changes if emptied is None else after(changes, emptied)
    collapse(rest, target.schema, target.key, counts).where(f"{OP} <> '{DELETE}'").createOrReplaceTempView(
        VIEW
    )
    rows = session.sql(
        merged_rows(
            place, VIEW, target.schema, target.key, keeps=counts.unchanged > 0, is_emptied=emptied is not None
        )
    )
    broken = [F.when(~F.coalesce(F.expr(text), F.lit(False)), name) for name, text in rules(metadata).items()]
    if not broken:
        return {}
    try:
        found = (
            rows.withColumn(_BROKEN, F.coalesce(*broken))
            .where(f"{_BROKEN} IS NOT NULL")
            .select(COMMIT_VERSION, ORDINAL, _BROKEN)
        )
    except AnalysisException:
        return {}
    return {
        (row[COMMIT_VERSION], row[ORDINAL]): f"violates the rule {row[_BROKEN]!r} of the target"
        for row in found.collect()
    }


# --- reduction of an epoch's changes ---


def may_be_text(arrow_type: pa.DataType) -> bool:
    """Whether a value may exceed its column's type, so that the column is null and `_exact` has the text. A
    key of such a type consists of the column and the text.
    """
    return bool(
        pa.types.is_decimal(arrow_type) or pa.types.is_temporal(arrow_type) or pa.types.is_nested(arrow_type)
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """The table's columns by number."""

    names: Sequence[str]
    keys: Sequence[int]
    text_keys: frozenset[int]

    @property
    def others(self) -> list[int]:
        return [index for index in range(len(self.names)) if index not in self.keys]

    def identity(self) -> list[Column]:
        """The expressions that identify a row."""
        parts = [F.col(value_column(index)) for index in self.keys]
        return parts + [F.col(EXACT)[self.names[index]] for index in self.keys if index in self.text_keys]


def last_truncate(changes: DataFrame) -> tuple[int, int] | None:
    """Position and ordinal of the last truncate; None if `changes` has none, whatever their counts say."""
    found = (
        changes.where(F.col(CHANGE_TYPE) == ChangeType.TRUNCATE)
        .select(COMMIT_VERSION, ORDINAL)
        .orderBy(F.desc(COMMIT_VERSION), F.desc(ORDINAL))
        .head(1)
    )
    return (found[0][COMMIT_VERSION], found[0][ORDINAL]) if found else None


def after(changes: DataFrame, place: tuple[int, int]) -> DataFrame:
    version, ordinal = place
    is_later = F.col(COMMIT_VERSION) > version
    return changes.where(is_later | ((F.col(COMMIT_VERSION) == version) & (F.col(ORDINAL) > ordinal)))


def collapse(changes: DataFrame, schema: pa.Schema, key: Sequence[str], counts: ChangeCounts) -> DataFrame:
    """Reduce `changes`, which contain no truncates, to one row per key. `schema` has the table's columns.

    `counts` may be too high, never too low. It only selects the cheapest way.
    """
    keys = [schema.names.index(name) for name in key]
    shape = _Shape(
        schema.names, keys, frozenset(index for index in keys if may_be_text(schema.field(index).type))
    )
    numbered = changes.select(
        *(F.col(quoted(name)).alias(value_column(index)) for index, name in enumerate(schema.names)),
        *(F.col(name) for name in (CHANGE_TYPE, COMMIT_VERSION, ORDINAL, UNCHANGED, EXACT)),
    )
    if counts.unchanged == 0:
        return _reduce_by_key(numbered, shape)
    return _reduce_by_chain(numbered, shape, moves=counts.moves > 0)


def _reduce_by_key(changes: DataFrame, shape: _Shape) -> DataFrame:
    by_key = Window.partitionBy(*shape.identity()).orderBy(COMMIT_VERSION, ORDINAL)
    last = changes.withColumn("is_last", _is_last(by_key)).where("is_last")
    return last.select(
        *(F.col(value_column(index)) for index in range(len(shape.names))),
        *(F.col(name) for name in (EXACT, COMMIT_VERSION, ORDINAL)),
        _op(),
        F.lit(True).alias(THERE),
        *(F.col(value_column(index)).alias(match_column(at)) for at, index in enumerate(shape.keys)),
        *(
            F.col(EXACT)[shape.names[index]].alias(match_text_column(at))
            for at, index in enumerate(shape.keys)
            if index in shape.text_keys
        ),
        F.lit(None).cast("array<string>").alias(KEPT),
    )


def _reduce_by_chain(changes: DataFrame, shape: _Shape, *, moves: bool) -> DataFrame:
    by_key = Window.partitionBy(*shape.identity()).orderBy(COMMIT_VERSION, ORDINAL)
    order = F.struct(F.col(COMMIT_VERSION).alias("v"), F.col(ORDINAL).alias("o"))
    born = F.last(F.when(F.col(CHANGE_TYPE) == ChangeType.INSERT, order), ignorenulls=True).over(by_key)
    chained = changes.withColumn("chain", F.coalesce(born, F.first(order).over(by_key)))
    chained = chained.withColumns({_CHAIN_VERSION: F.col("chain.v"), _CHAIN_ORDINAL: F.col("chain.o")}).drop(
        "chain"
    )
    if moves:
        chained = _join_chains(chained)

    by_chain = Window.partitionBy(_CHAIN_VERSION, _CHAIN_ORDINAL).orderBy(COMMIT_VERSION, ORDINAL)
    firsts = {
        match_column(at): F.first(value_column(index)).over(by_chain) for at, index in enumerate(shape.keys)
    }
    for at, index in enumerate(shape.keys):
        if index in shape.text_keys:
            firsts[match_text_column(at)] = F.first(F.col(EXACT)[shape.names[index]]).over(by_chain)
    folded = chained.withColumns(
        {f"carried_{index}": _carried(index, shape.names[index], by_chain) for index in shape.others}
        | firsts
        | {THERE: F.first(CHANGE_TYPE).over(by_chain) != ChangeType.INSERT, "is_last": _is_last(by_chain)}
    )
    # A chain that began and ended within the epoch has no effect.
    last = folded.where(F.col("is_last") & (F.col(THERE) | (F.col(CHANGE_TYPE) != ChangeType.DELETE)))
    return _folded_row(last, shape, list(firsts))


def _folded_row(last: DataFrame, shape: _Shape, matches: Sequence[str]) -> DataFrame:
    texts = {index: F.col(EXACT)[shape.names[index]] for index in shape.keys}
    texts |= {index: F.col(f"carried_{index}.x") for index in shape.others}
    pairs = [
        F.when(text.isNotNull(), F.struct(F.lit(shape.names[index]).alias("k"), text.alias("v")))
        for index, text in texts.items()
    ]
    exact = F.map_from_entries(F.array_compact(F.array(*pairs)))
    missing = [
        F.when(F.col(f"carried_{index}").isNull(), F.lit(shape.names[index])) for index in shape.others
    ]
    kept = F.array_compact(F.array(*missing).cast("array<string>"))
    is_upsert = F.col(CHANGE_TYPE) != ChangeType.DELETE
    return last.select(
        *(
            F.col(value_column(index))
            if index in shape.keys
            else F.col(f"carried_{index}.v").alias(value_column(index))
            for index in range(len(shape.names))
        ),
        F.when(F.size(exact) > 0, exact).alias(EXACT),
        *(F.col(name) for name in (COMMIT_VERSION, ORDINAL)),
        _op(),
        F.col(THERE),
        *(F.when(F.col(THERE), F.col(name)).alias(name) for name in matches),
        F.when(is_upsert & (F.size(kept) > 0), kept).alias(KEPT),
    )


def _carried(index: int, name: str, by_chain: WindowSpec) -> Column:
    """The last value of a column that was sent, with its exact text, in a struct. The struct is null if no
    value was sent.
    """
    travelled = ~F.coalesce(F.array_contains(UNCHANGED, name), F.lit(False)) & (
        F.col(CHANGE_TYPE) != ChangeType.DELETE
    )
    value = F.struct(F.col(value_column(index)).alias("v"), F.col(EXACT)[name].alias("x"))
    return F.last(F.when(travelled, value), ignorenulls=True).over(by_chain)


def _join_chains(chained: DataFrame) -> DataFrame:
    """Join the chains before and after each key change with unchanged values.

    Each such key change is an edge from one chain to the previous one, stored as four numbers. The driver
    follows the edges; one join then assigns to each change the start of its chain.
    """
    moved = chained.where((F.col(CHANGE_TYPE) == ChangeType.INSERT) & F.col(UNCHANGED).isNotNull())
    ended = chained.where(F.col(CHANGE_TYPE) == ChangeType.DELETE)
    halves = moved.select(
        F.col(COMMIT_VERSION).alias("v"), F.col(ORDINAL).alias("o"), (F.col(ORDINAL) - 1).alias("before")
    )
    others = ended.select(
        F.col(COMMIT_VERSION).alias("v"), F.col(ORDINAL).alias("before"), _CHAIN_VERSION, _CHAIN_ORDINAL
    )
    edges = halves.join(others, ["v", "before"]).select("v", "o", _CHAIN_VERSION, _CHAIN_ORDINAL).toArrow()
    if not edges.num_rows:
        return chained
    names = ("child_version", "child_ordinal", "root_version", "root_ordinal")
    roots = chained.sparkSession.createDataFrame(pa.table(dict(zip(names, _roots(edges), strict=True))))
    if edges.num_rows <= _BROADCAST_EDGES:
        roots = F.broadcast(roots)
    is_child = (F.col(_CHAIN_VERSION) == F.col("child_version")) & (
        F.col(_CHAIN_ORDINAL) == F.col("child_ordinal")
    )
    joined = chained.join(roots, is_child, "left").withColumns(
        {
            _CHAIN_VERSION: F.coalesce("root_version", _CHAIN_VERSION),
            _CHAIN_ORDINAL: F.coalesce("root_ordinal", _CHAIN_ORDINAL),
        }
    )
    return joined.drop(*names)


def _roots(edges: pa.Table) -> list[pa.Array]:
    """For each edge, its chain and the chain at the end of its path of edges, each in two columns."""
    version, ordinal, parent_version, parent_ordinal = (np.asarray(column) for column in edges.columns)
    count = len(version)
    lives = np.empty(2 * count, [("v", np.int64), ("o", np.int64)])
    lives["v"], lives["o"] = (
        np.concatenate([version, parent_version]),
        np.concatenate([ordinal, parent_ordinal]),
    )
    known, numbers = np.unique(lives, return_inverse=True)
    before = np.arange(len(known))
    before[numbers[:count]] = numbers[count:]
    while not np.array_equal(before, before[before]):
        before = before[before]
    roots = known[before[numbers[:count]]]
    return [pa.array(each) for each in (version, ordinal, roots["v"].copy(), roots["o"].copy())]


def _is_last(window: WindowSpec) -> Column:
    return F.lead(F.lit(True)).over(window).isNull()


def _op() -> Column:
    return F.when(F.col(CHANGE_TYPE) == ChangeType.DELETE, DELETE).otherwise(UPSERT).alias(OP)


def replacements(
    session: SparkSession, columns: pa.Schema, key: Sequence[str], changed: ChangedRows
) -> DataFrame:
    """The keys to delete, where `_there` is true, and the rows to insert, where it is false."""
    struct = from_arrow_schema(row_schema(columns), prefer_timestamp_ntz=True)
    matches = [name for at in range(len(key)) for name in (match_column(at), match_text_column(at))]
    keys = session.read.parquet(changed.keys).select(*matches, F.lit(True).alias(THERE))
    rows = (
        session.read.schema(struct).parquet(*changed.rows)
        if changed.rows
        else session.createDataFrame([], struct)
    )
    return keys.unionByName(rows.withColumn(THERE, F.lit(False)), allowMissingColumns=True)
