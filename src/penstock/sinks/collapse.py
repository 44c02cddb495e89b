"""An epoch's changes of one table, folded to what they amount to: at most one row for each row of the target.

The order is `(_commit_version, _ordinal)`, always. The result has the table's columns, `_exact`, and two of its own:

- `_op`: `delete`, or `upsert`;
- `_match_<n>` for each key column: the key under which the row stands in the target *before* the epoch; null if it does not stand there.

Mostly `_match` is the key itself. It differs when a key change leaves a TOASTed value behind: the change carries no value, and only the row
under the old key has it. Such a row is therefore updated in place, key and all, instead of deleted and inserted.

For that, changes are grouped not by key but by *life*: a life begins with an insert, or was there before the epoch; an insert that is half
of a key change with unchanged values goes on with the life that the other half, the delete with the ordinal before it, ends. Within a life
an unchanged value is the last one that travelled; where none did, the target keeps its own (`_kept` names those columns).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, EXACT, ORDINAL, UNCHANGED, ChangeCounts, ChangeType
from penstock.sinks.names import quoted

OP = "_op"
KEPT = "_kept"
DELETE = "delete"
UPSERT = "upsert"

_BORN = "_born"
_ROOT = "_root"
_RANK = "_rank"


def match_column(index: int) -> str:
    return f"_match_{index}"


def after_last_truncate(changes: DataFrame, counts: ChangeCounts) -> DataFrame:
    """What still counts when the table was emptied on the way. Only for epochs that hold a truncate."""
    if not counts.truncates:
        return changes
    order = F.struct(COMMIT_VERSION, ORDINAL)
    last = changes.where(F.col(CHANGE_TYPE) == ChangeType.TRUNCATE).agg(F.max(order).alias("t"))
    return changes.crossJoin(F.broadcast(last)).where(order > F.col("t")).drop("t")


def collapse(changes: DataFrame, key: Sequence[str], columns: Sequence[str], counts: ChangeCounts) -> DataFrame:
    """Fold `changes`. `counts` may count more than there is, never less: it only chooses the shortest way."""
    if counts.unchanged == 0:
        return _fold_by_key(changes, key, columns)
    return _fold_by_life(changes, key, columns, moves=counts.moves > 0)


def _fold_by_key(changes: DataFrame, key: Sequence[str], columns: Sequence[str]) -> DataFrame:
    newest = Window.partitionBy(*_cols(key)).orderBy(F.desc(COMMIT_VERSION), F.desc(ORDINAL))
    last = changes.withColumn(_RANK, F.row_number().over(newest)).where(F.col(_RANK) == 1)
    matches = [F.col(quoted(name)).alias(match_column(index)) for index, name in enumerate(key)]
    return last.select(*_cols(columns), F.col(EXACT), _op(), F.lit(None).cast("array<string>").alias(KEPT), *matches)


def _fold_by_life(changes: DataFrame, key: Sequence[str], columns: Sequence[str], *, moves: bool) -> DataFrame:
    order = F.struct(COMMIT_VERSION, ORDINAL)
    by_key = Window.partitionBy(*_cols(key)).orderBy(COMMIT_VERSION, ORDINAL)
    is_insert = F.col(CHANGE_TYPE) == ChangeType.INSERT
    living = changes.withColumn(_BORN, F.last(F.when(is_insert, order), ignorenulls=True).over(by_key))
    root = F.struct(*_cols(key), F.col(_BORN).alias(_BORN))
    living = _rooted(living, key) if moves else living.withColumn(_ROOT, root)

    by_life = Window.partitionBy(_ROOT).orderBy(COMMIT_VERSION, ORDINAL)
    so_far = by_life.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    carried = {name: _carried(name, so_far) for name in columns if name not in key}
    folded = living.withColumns({f"_carried_{index}": value for index, value in enumerate(carried.values())})
    newest = Window.partitionBy(_ROOT).orderBy(F.desc(COMMIT_VERSION), F.desc(ORDINAL))
    last = folded.withColumn(_RANK, F.row_number().over(newest)).where(F.col(_RANK) == 1)
    return _final(last, key, columns, {name: f"_carried_{index}" for index, name in enumerate(carried)})


def _final(last: DataFrame, key: Sequence[str], columns: Sequence[str], carried: dict[str, str]) -> DataFrame:
    was_there = F.col(f"{_ROOT}.{_BORN}").isNull()
    # A life that began and ended within the epoch leaves nothing behind.
    kept = last.where((F.col(CHANGE_TYPE) != ChangeType.DELETE) | was_there)
    values = [F.col(quoted(name)) if name in key else F.col(f"{carried[name]}.v").alias(name) for name in columns]
    missing = F.array_compact(
        F.array(*[F.when(F.col(field).isNull(), F.lit(name)) for name, field in carried.items()]).cast("array<string>")
    )
    texts = {name: F.col(f"{field}.x") for name, field in carried.items()} | {name: F.col(EXACT)[name] for name in key}
    pairs = [F.when(text.isNotNull(), F.struct(F.lit(name).alias("k"), text.alias("v"))) for name, text in texts.items()]
    entries = F.map_from_entries(F.array_compact(F.array(*pairs)))
    matches = [
        F.when(was_there, F.col(f"{_ROOT}.{quoted(name)}")).alias(match_column(index)) for index, name in enumerate(key)
    ]
    return kept.select(
        *values,
        F.when(F.size(entries) > 0, entries).alias(EXACT),
        _op(),
        F.when(F.col(CHANGE_TYPE) != ChangeType.DELETE, F.when(F.size(missing) > 0, missing)).alias(KEPT),
        *matches,
    )


def _carried(name: str, so_far: object) -> Column:
    """The last value of a column that travelled, wrapped so that a null value is told from none; with its exact text."""
    travelled = ~F.coalesce(F.array_contains(UNCHANGED, name), F.lit(False)) & (F.col(CHANGE_TYPE) != ChangeType.DELETE)
    value = F.struct(F.col(quoted(name)).alias("v"), F.col(EXACT)[name].alias("x"))
    return F.last(F.when(travelled, value), ignorenulls=True).over(so_far)  # type: ignore[arg-type]


def _rooted(living: DataFrame, key: Sequence[str]) -> DataFrame:
    """Give every change the life it belongs to, through key changes that left values behind.

    Each such key change is an edge from one life to the one before it. Edges are few (keys and positions only), and chains of them are
    followed here, in the driver; the lives of all changes are then found by one join.
    """
    life = F.struct(*_cols(key), F.col(_BORN).alias(_BORN))
    moved = living.where((F.col(CHANGE_TYPE) == ChangeType.INSERT) & F.col(UNCHANGED).isNotNull())
    ended = living.where(F.col(CHANGE_TYPE) == ChangeType.DELETE)
    edges = (
        moved.select(F.col(COMMIT_VERSION).alias("v"), (F.col(ORDINAL) - 1).alias("o"), life.alias("child"))
        .join(ended.select(F.col(COMMIT_VERSION).alias("v"), F.col(ORDINAL).alias("o"), life.alias("parent")), ["v", "o"])
        .select("child", "parent")
    )
    found = edges.collect()
    if not found:
        return living.withColumn(_ROOT, life)
    parents = {repr(row["child"]): row["parent"] for row in found}  # by repr: a binary key cannot be hashed
    roots = []
    for row in found:
        root = row["parent"]
        while repr(root) in parents:
            root = parents[repr(root)]
        roots.append((row["child"], root))
    table = living.sparkSession.createDataFrame(roots, edges.schema)
    joined = living.withColumn("_life", life).join(F.broadcast(table), F.col("_life") == F.col("child"), "left")
    return joined.withColumn(_ROOT, F.coalesce("parent", "_life")).drop("_life", "child", "parent")


def _op() -> Column:
    return F.when(F.col(CHANGE_TYPE) == ChangeType.DELETE, DELETE).otherwise(UPSERT).alias(OP)


def _cols(names: Sequence[str]) -> list[Column]:
    return [F.col(quoted(name)) for name in names]


