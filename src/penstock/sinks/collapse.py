"""An epoch's changes of one table, folded to what they amount to: at most one row for each row of the target.

The order is `(_commit_version, _ordinal)`, always. The result holds, for `columns` and `key` of the table:

- `value_<i>`: the columns' new values. The table's own names do not appear: whatever they are, they cannot meet ours;
- `_exact`: the exact texts that go with them;
- `_op`: `delete`, or `upsert`;
- `_there`: whether the row stands in the target before the epoch, under the key that follows;
- `match_<j>` for each key column, and `match_text_<j>` for those whose exact value may be a text (see `may_be_text`);
- `_commit_version` and `_ordinal`: of the last change;
- `_kept`: names of the columns of which the target keeps its own value; null if there are none.

Mostly `match` is the key itself. It differs when a key change leaves a TOASTed value behind: the change carries no value, and only the row
under the old key has it. Such a row is therefore updated in place, key and all, instead of deleted and inserted.

For that, changes are grouped not by key but by *life*: a life begins with an insert, or was there before the epoch; an insert that is half
of a key change with unchanged values goes on with the life that the other half, the delete with the ordinal before it, ends. A life is
known by the position and ordinal of its first change. Within a life an unchanged value is the last one that travelled; where none did, the
target keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, EXACT, ORDINAL, UNCHANGED, ChangeCounts, ChangeType
from penstock.sinks.names import quoted

OP = "_op"
KEPT = "_kept"
THERE = "_there"
DELETE = "delete"
UPSERT = "upsert"

_LIFE_VERSION, _LIFE_ORDINAL = "life_version", "life_ordinal"
_BROADCAST_EDGES = 100_000


def value_column(index: int) -> str:
    return f"value_{index}"


def match_column(index: int) -> str:
    return f"match_{index}"


def match_text_column(index: int) -> str:
    return f"match_text_{index}"


def may_be_text(arrow_type: pa.DataType) -> bool:
    """Whether a value can be beyond its column's type, so that the column is null and `_exact` has it. A key is then known by both."""
    return bool(pa.types.is_decimal(arrow_type) or pa.types.is_temporal(arrow_type) or pa.types.is_nested(arrow_type))


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
        """What tells rows apart."""
        parts = [F.col(value_column(index)) for index in self.keys]
        return parts + [F.col(EXACT)[self.names[index]] for index in self.keys if index in self.text_keys]


def last_truncate(changes: DataFrame) -> tuple[int, int] | None:
    """Where the table was last emptied: position and ordinal. Counts of a file that is read in part do not tell."""
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
    """Fold `changes` of a table with the columns `schema`, no truncate among them.

    `counts` may count more than there is, never less: it only chooses the shortest way.
    """
    keys = [schema.names.index(name) for name in key]
    shape = _Shape(schema.names, keys, frozenset(index for index in keys if may_be_text(schema.field(index).type)))
    numbered = changes.select(
        *(F.col(quoted(name)).alias(value_column(index)) for index, name in enumerate(schema.names)),
        *(F.col(name) for name in (CHANGE_TYPE, COMMIT_VERSION, ORDINAL, UNCHANGED, EXACT)),
    )
    if counts.unchanged == 0:
        return _fold_by_key(numbered, shape)
    return _fold_by_life(numbered, shape, moves=counts.moves > 0)


def _fold_by_key(changes: DataFrame, shape: _Shape) -> DataFrame:
    by_key = Window.partitionBy(*shape.identity()).orderBy(COMMIT_VERSION, ORDINAL)
    last = changes.withColumn("is_last", _is_last(by_key)).where("is_last")
    return last.select(
        *(F.col(value_column(index)) for index in range(len(shape.names))),
        *(F.col(name) for name in (EXACT, COMMIT_VERSION, ORDINAL)),
        _op(),
        F.lit(True).alias(THERE),
        *(F.col(value_column(index)).alias(match_column(at)) for at, index in enumerate(shape.keys)),
        *(F.col(EXACT)[shape.names[index]].alias(match_text_column(at)) for at, index in enumerate(shape.keys) if index in shape.text_keys),
        F.lit(None).cast("array<string>").alias(KEPT),
    )


def _fold_by_life(changes: DataFrame, shape: _Shape, *, moves: bool) -> DataFrame:
    by_key = Window.partitionBy(*shape.identity()).orderBy(COMMIT_VERSION, ORDINAL)
    order = F.struct(F.col(COMMIT_VERSION).alias("v"), F.col(ORDINAL).alias("o"))
    born = F.last(F.when(F.col(CHANGE_TYPE) == ChangeType.INSERT, order), ignorenulls=True).over(by_key)
    living = changes.withColumn("life", F.coalesce(born, F.first(order).over(by_key)))
    living = living.withColumns({_LIFE_VERSION: F.col("life.v"), _LIFE_ORDINAL: F.col("life.o")}).drop("life")
    if moves:
        living = _joined_lives(living)

    by_life = Window.partitionBy(_LIFE_VERSION, _LIFE_ORDINAL).orderBy(COMMIT_VERSION, ORDINAL)
    firsts = {match_column(at): F.first(value_column(index)).over(by_life) for at, index in enumerate(shape.keys)}
    for at, index in enumerate(shape.keys):
        if index in shape.text_keys:
            firsts[match_text_column(at)] = F.first(F.col(EXACT)[shape.names[index]]).over(by_life)
    folded = living.withColumns(
        {f"carried_{index}": _carried(index, shape.names[index], by_life) for index in shape.others}
        | firsts
        | {THERE: F.first(CHANGE_TYPE).over(by_life) != ChangeType.INSERT, "is_last": _is_last(by_life)}
    )
    # A life that began and ended within the epoch leaves nothing behind.
    last = folded.where(F.col("is_last") & (F.col(THERE) | (F.col(CHANGE_TYPE) != ChangeType.DELETE)))
    return _folded_row(last, shape, list(firsts))


def _folded_row(last: DataFrame, shape: _Shape, matches: Sequence[str]) -> DataFrame:
    texts = {index: F.col(EXACT)[shape.names[index]] for index in shape.keys}
    texts |= {index: F.col(f"carried_{index}.x") for index in shape.others}
    pairs = [F.when(text.isNotNull(), F.struct(F.lit(shape.names[index]).alias("k"), text.alias("v"))) for index, text in texts.items()]
    exact = F.map_from_entries(F.array_compact(F.array(*pairs)))
    missing = [F.when(F.col(f"carried_{index}").isNull(), F.lit(shape.names[index])) for index in shape.others]
    kept = F.array_compact(F.array(*missing).cast("array<string>"))
    is_upsert = F.col(CHANGE_TYPE) != ChangeType.DELETE
    return last.select(
        *(
            F.col(value_column(index)) if index in shape.keys else F.col(f"carried_{index}.v").alias(value_column(index))
            for index in range(len(shape.names))
        ),
        F.when(F.size(exact) > 0, exact).alias(EXACT),
        *(F.col(name) for name in (COMMIT_VERSION, ORDINAL)),
        _op(),
        F.col(THERE),
        *(F.when(F.col(THERE), F.col(name)).alias(name) for name in matches),
        F.when(is_upsert & (F.size(kept) > 0), kept).alias(KEPT),
    )


def _carried(index: int, name: str, by_life: WindowSpec) -> Column:
    """The last value of a column that travelled, wrapped so that a null value is told from none; with its exact text."""
    travelled = ~F.coalesce(F.array_contains(UNCHANGED, name), F.lit(False)) & (F.col(CHANGE_TYPE) != ChangeType.DELETE)
    value = F.struct(F.col(value_column(index)).alias("v"), F.col(EXACT)[name].alias("x"))
    return F.last(F.when(travelled, value), ignorenulls=True).over(by_life)


def _joined_lives(living: DataFrame) -> DataFrame:
    """Give changes after a key change that left values behind the life from before it.

    Each such key change is an edge from one life to the one before. Edges are four numbers each; chains of them are followed here, in the
    driver, and the changes then find the beginning of their life by one join.
    """
    moved = living.where((F.col(CHANGE_TYPE) == ChangeType.INSERT) & F.col(UNCHANGED).isNotNull())
    ended = living.where(F.col(CHANGE_TYPE) == ChangeType.DELETE)
    halves = moved.select(F.col(COMMIT_VERSION).alias("v"), F.col(ORDINAL).alias("o"), (F.col(ORDINAL) - 1).alias("before"))
    others = ended.select(F.col(COMMIT_VERSION).alias("v"), F.col(ORDINAL).alias("before"), _LIFE_VERSION, _LIFE_ORDINAL)
    edges = halves.join(others, ["v", "before"]).select("v", "o", _LIFE_VERSION, _LIFE_ORDINAL).toArrow()
    if not edges.num_rows:
        return living
    names = ("child_version", "child_ordinal", "root_version", "root_ordinal")
    roots = living.sparkSession.createDataFrame(pa.table(dict(zip(names, _roots(edges), strict=True))))
    if edges.num_rows <= _BROADCAST_EDGES:
        roots = F.broadcast(roots)
    is_child = (F.col(_LIFE_VERSION) == F.col("child_version")) & (F.col(_LIFE_ORDINAL) == F.col("child_ordinal"))
    joined = living.join(roots, is_child, "left").withColumns(
        {
            _LIFE_VERSION: F.coalesce("root_version", _LIFE_VERSION),
            _LIFE_ORDINAL: F.coalesce("root_ordinal", _LIFE_ORDINAL),
        }
    )
    return joined.drop(*names)


def _roots(edges: pa.Table) -> list[pa.Array]:
    """For each edge its child, and the life at which the chain of edges from there ends; each in two columns."""
    version, ordinal, parent_version, parent_ordinal = (np.asarray(column) for column in edges.columns)
    count = len(version)
    lives = np.empty(2 * count, [("v", np.int64), ("o", np.int64)])
    lives["v"], lives["o"] = np.concatenate([version, parent_version]), np.concatenate([ordinal, parent_ordinal])
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
