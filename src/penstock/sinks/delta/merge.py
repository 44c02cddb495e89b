"""Epochs by Delta's own means, for tables that have something that our own commits do not know how to keep (`delta/protocol.py`).

An epoch of inserts is an append; any other epoch is one MERGE; an epoch that empties the table is one overwrite. The session writes the
position with whatever it commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.change import COMMIT_VERSION, EXACT, ORDINAL, ChangeCounts
from penstock.errors import SinkError, SinkRefusedError, TargetRewoundError
from penstock.sinks.base import Target
from penstock.sinks.collapse import (
    DELETE,
    KEPT,
    OP,
    THERE,
    after,
    collapse,
    last_truncate,
    match_column,
    match_text_column,
    may_be_text,
    value_column,
)
from penstock.sinks.delta.commits import has_moved
from penstock.sinks.names import quoted, text_literal

_MISSING = text_literal(f"{TargetRewoundError.code}: a row that was copied or applied before is no longer in the target")


VIEW = "penstock_changes"


def unless_moved(changes: DataFrame, path: Path, application: str, version: int) -> DataFrame:
    """`changes` of an epoch that was planned for the table as it was at `version`; whoever reads them after a commit of ours gets an error.

    Delta reads them after it has begun its transaction, and itself refuses what another run of ours commits from then on. What one had
    committed before, it takes for what was there, and rows would come twice.
    """

    checked: list[bool] = []

    def is_wanted(_: int) -> bool:
        if not checked and has_moved(path, application, version):
            raise SinkError("another run of the pipeline writes to it")
        checked[:] = [True]
        return True

    return changes.where(F.udf(is_wanted, "boolean", useArrow=False)(COMMIT_VERSION))


def merge_changes(
    session: SparkSession, place: str, target: Target, changes: DataFrame, counts: ChangeCounts, *, may_append: bool = True
) -> None:
    """Bring `changes` to the Delta table at `place`."""
    emptied = last_truncate(changes) if counts.truncates else None
    if emptied is not None:
        rest = collapse(after(changes, emptied), target.schema, target.key, counts).where(f"{OP} <> '{DELETE}'")
        values = [F.col(value_column(index)).alias(name) for index, name in enumerate(target.schema.names)]
        rest.select(*values, EXACT).write.format("delta").mode("overwrite").save(place)
    elif may_append and not (counts.updates or counts.deletes or counts.moves):
        # Inserts alone cannot meet a row that is there: the target equals the source just before them, and the key is unique there.
        rows = changes.select(*(quoted(name) for name in target.schema.names), EXACT)
        rows.write.format("delta").mode("append").save(place)
    else:
        collapse(changes, target.schema, target.key, counts).createOrReplaceTempView(VIEW)
        session.sql(merge_statement(place, VIEW, target.schema, target.key, keeps=counts.unchanged > 0)).collect()


def merge_statement(place: str, view: str, schema: pa.Schema, key: Sequence[str], *, keeps: bool) -> str:
    """MERGE `view` (what `collapse` gives) into the Delta table at `place`. `keeps`: some rows leave values as they are."""
    kept = {name for name in schema.names if keeps and name not in key}
    values = {name: f"s.{value_column(index)}" for index, name in enumerate(schema.names)}
    updates = [f"t.{quoted(name)} = {_updated(name, value) if name in kept else value}" for name, value in values.items()]
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


def merged_rows(place: str, view: str, schema: pa.Schema, key: Sequence[str], *, keeps: bool, is_emptied: bool) -> str:
    """Select the rows of `view` as that MERGE would write them, each with the place of its last change."""
    kept = {name for name in schema.names if keeps and name not in key}
    values = {name: f"s.{value_column(index)}" for index, name in enumerate(schema.names)}
    columns = [f"{_updated(name, value) if name in kept else value} AS {quoted(name)}" for name, value in values.items()]
    columns += [f"{_exact(keeps)} AS {quoted(EXACT)}", f"s.{COMMIT_VERSION}", f"s.{ORDINAL}"]
    met = "false" if is_emptied else _condition(schema, key)
    return " ".join([f"SELECT {', '.join(columns)}", f"FROM {view} s", f"LEFT JOIN delta.{quoted(place)} t ON {met}"])


def replace_statement(place: str, view: str, schema: pa.Schema, key: Sequence[str]) -> str:
    """Take out of the Delta table at `place` all rows that meet a row of `view` with `_there`, and put the other rows of `view` in."""
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
    """A key is null only where the type cannot hold it, and then its exact text must be the same."""
    if not key:
        raise SinkRefusedError("a table without a key cannot be merged into", hint="give the table a primary key, and copy it anew")
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
    """A value that only the target could have, and the target has no such row: that must not become a null in silence."""
    return f"CASE WHEN {_is_kept(name)} THEN raise_error({_MISSING}) ELSE {value} END"


def _exact(keeps: bool) -> str:
    """The exact texts of kept values stay with them."""
    exact = quoted(EXACT)
    if not keeps:
        return f"s.{exact}"
    stay = f"map_filter(coalesce(t.{exact}, map()), (k, v) -> array_contains(s.{KEPT}, k))"
    whole = f"map_concat({stay}, coalesce(s.{exact}, map()))"
    return f"CASE WHEN s.{KEPT} IS NULL THEN s.{exact} WHEN size({whole}) > 0 THEN {whole} END"
