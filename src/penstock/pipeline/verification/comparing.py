"""Two tables of one shape, compared by the hashes of their rows, then, only where these differ, row by row and column by column.

Rows fall into buckets by their key, and each side sums up the hashes of its rows by bucket. That needs no exchange of rows and no order,
and a row that is missing, doubled or different in any column changes the sum of its bucket. Only rows of buckets that differ are laid side
by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from penstock.change import EXACT
from penstock.pipeline.verification.canonical import canonical, row_hash, shown
from penstock.schema import TableName, TableSchema
from penstock.sinks.names import quoted

EXAMPLES = 5
"""Of each kind, in the order of the keys."""

_BUCKETS = 4096
_HALF = 32
_HELD = "key of a letter"
_KEY, _HASH, _BUCKET, _ROW, _SIDE, _TURN = "key", "hash", "bucket", "row", "side", "turn"


@dataclass(frozen=True, slots=True)
class ColumnDifference:
    """One value, as text; None is null."""

    column: str
    source: str | None
    target: str | None


@dataclass(frozen=True, slots=True)
class RowDifference:
    """One row that is not the same on both sides. `kind` is `missing`, `extra` or `different`, as seen from the target."""

    kind: str
    key: dict[str, str | None]
    columns: tuple[ColumnDifference, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one table compares. All counts are exact; `examples` are the first of each kind."""

    table: TableName
    source_rows: int
    target_rows: int
    missing: int = 0
    extra: int = 0
    different: int = 0
    columns: dict[str, int] = field(default_factory=dict)
    """How many of the different rows differ in each column."""
    examples: tuple[RowDifference, ...] = ()
    has_equal_digests: bool = True
    held: int = 0
    """Rows that are in dead letters: neither compared nor counted on either side."""

    @property
    def equal(self) -> bool:
        return self.equal_but_held and not self.held

    @property
    def equal_but_held(self) -> bool:
        """By the sums and the counts alone; what was found row by row only explains them."""
        return self.has_equal_digests and self.source_rows == self.target_rows


@dataclass(frozen=True, slots=True)
class TableComparer:
    """The expressions for one table, the same for both sides."""

    schema: TableSchema
    types: dict[str, DataType]

    def compare(self, source: DataFrame, target: DataFrame, held: DataFrame | None = None) -> Comparison:
        """Read both sides once, and the parts that differ again. Rows under a key of `held` are left out, and counted apart."""
        if held is not None:
            keys = held.select(F.struct(*self._key()).alias(_HELD)).distinct()
            is_held = F.struct(*self._key()).eqNullSafe(keys[_HELD])
            left, right = (frame.join(F.broadcast(keys), is_held, "left_anti") for frame in (source, target))
            return replace(self.compare(left, right), held=keys.count())
        sums = self._digests(source, target)
        counted = Comparison(self.schema.name, sum(each["source_rows"] for each in sums), sum(each["target_rows"] for each in sums))
        buckets = [each[_BUCKET] for each in sums if each["high"] or each["low"] or each["source_rows"] != each["target_rows"]]
        return self._describe(counted, source, target, buckets) if buckets else counted

    # the sums ------------------------------------------------------------------------------------------------------------------

    def _digests(self, source: DataFrame, target: DataFrame) -> list[Any]:
        """By bucket: the rows of each side, and what is left when the target's hashes are taken from the source's, in two halves.

        In halves, since a sum of whole hashes would overflow; that of halves has room for two thousand million rows.
        """
        hashes = [frame.select(self._bucket(), self._hash(), _side(value)) for frame, value in ((source, 1), (target, -1))]
        both = hashes[0].unionAll(hashes[1])
        side = F.col(_SIDE)
        return (
            both.groupBy(_BUCKET)
            .agg(
                F.count_if(side > 0).alias("source_rows"),
                F.count_if(side < 0).alias("target_rows"),
                F.sum(side * F.shiftright(_HASH, _HALF)).alias("high"),
                F.sum(side * F.col(_HASH).bitwiseAND(F.lit((1 << _HALF) - 1))).alias("low"),
            )
            .collect()
        )

    def _columns(self) -> list[str]:
        return [*self.schema.column_names, EXACT]

    def _hash(self) -> Column:
        return row_hash([(F.col(quoted(name)), self.types[name]) for name in self._columns()]).alias(_HASH)

    def _key(self) -> list[Column]:
        """What tells rows apart: a key column may be null, and its value in `_exact`. Without a key, the row itself."""
        names = self.schema.key
        if not names:
            return [self._hash()]
        return [F.col(quoted(name)) for name in names] + [F.col(EXACT)[name].alias(f"{name} exactly") for name in names]

    def _bucket(self) -> Column:
        return F.pmod(F.xxhash64(*self._key()), F.lit(_BUCKETS)).alias(_BUCKET)

    # the rows ------------------------------------------------------------------------------------------------------------------

    def _describe(self, counted: Comparison, source: DataFrame, target: DataFrame, buckets: Sequence[int]) -> Comparison:
        pairs = self._pairs(source, target, buckets).cache()
        try:
            found = {row["kind"]: row for row in self._counts(pairs)}
            examples = self._examples(pairs)
        finally:
            pairs.unpersist()
        missing, extra, different = (found[kind]["rows"] if kind in found else 0 for kind in ("missing", "extra", "different"))
        columns = found["different"]["columns"] if different else []
        named = {name: count for name, count in zip(self._columns(), columns, strict=False) if count}
        return Comparison(
            counted.table, counted.source_rows, counted.target_rows, missing, extra, different, named, examples, has_equal_digests=False
        )

    def _pairs(self, source: DataFrame, target: DataFrame, buckets: Sequence[int]) -> DataFrame:
        """The rows that have no equal on the other side, by key: the source's as `l`, the target's as `r`."""
        sides = [self._rows(frame, side, buckets) for frame, side in ((source, 1), (target, -1))]
        rows = sides[0].unionAll(sides[1])
        side = F.col(_SIDE)
        alike = Window.partitionBy(_KEY, _HASH)
        surplus = (
            rows.withColumn("balance", F.sum(side).over(alike))
            .withColumn(_TURN, F.row_number().over(Window.partitionBy(_KEY, _HASH, _SIDE).orderBy(F.lit(0))))
            .where((side * F.col("balance") > 0) & (F.col(_TURN) <= F.abs("balance")))
            # A key that is there twice: its rows meet those of the other side in turn.
            .withColumn(_TURN, F.row_number().over(Window.partitionBy(_KEY, _SIDE).orderBy(_HASH)))
        )
        sides_of_pair = [F.first(F.when(side == value, F.col(_ROW)), ignorenulls=True).alias(name) for name, value in (("l", 1), ("r", -1))]
        kind = F.when(F.col("r").isNull(), "missing").when(F.col("l").isNull(), "extra").otherwise("different").alias("kind")
        return surplus.groupBy(_KEY, _TURN).agg(*sides_of_pair).select(_KEY, "l", "r", kind)

    def _rows(self, frame: DataFrame, side: int, buckets: Sequence[int]) -> DataFrame:
        if len(buckets) < _BUCKETS:
            frame = frame.where(self._bucket().isin(*buckets))
        row = F.struct(*(F.col(quoted(name)).alias(f"_{at}") for at, name in enumerate(self._columns()))).alias(_ROW)
        return frame.select(F.struct(*self._key()).alias(_KEY), self._hash(), row, _side(side))

    def _differs(self, at: int, name: str) -> Column:
        left, right = (canonical(F.col(f"{side}._{at}"), self.types[name]) for side in ("l", "r"))
        return ~left.eqNullSafe(right)

    def _counts(self, pairs: DataFrame) -> list[Any]:
        columns = [F.count_if(self._differs(at, name)) for at, name in enumerate(self._columns())]
        return pairs.groupBy("kind").agg(F.count(F.lit(1)).alias("rows"), F.array(*columns).alias("columns")).collect()

    def _examples(self, pairs: DataFrame) -> tuple[RowDifference, ...]:
        first = Window.partitionBy("kind").orderBy(_KEY)
        chosen = pairs.withColumn(_TURN, F.row_number().over(first)).where(F.col(_TURN) <= EXAMPLES)
        names = self._columns()
        keys = [names.index(name) for name in self.schema.key] or range(len(names))
        key = F.array(*(F.coalesce(self._shown("l", at), self._shown("r", at)) for at in keys)).alias("texts")
        columns = [
            F.when(self._differs(at, name), F.struct(F.lit(name), self._shown("l", at), self._shown("r", at)))
            for at, name in enumerate(names)
        ]
        differing = F.when(F.col("kind") == "different", F.filter(F.array(*columns), lambda each: each.isNotNull())).alias("columns")
        rows = chosen.orderBy("kind", _TURN).select("kind", key, differing).collect()
        return tuple(
            RowDifference(
                row["kind"],
                dict(zip([names[at] for at in keys], row["texts"], strict=True)),
                tuple(ColumnDifference(*each) for each in row["columns"] or ()),
            )
            for row in rows
        )

    def _shown(self, side: str, at: int) -> Column:
        """A value as text: the exact one where its type cannot hold it."""
        name = self._columns()[at]
        text = shown(F.col(f"{side}._{at}"), self.types[name])
        return text if name == EXACT else F.coalesce(text, F.col(f"{side}._{len(self.schema.column_names)}")[name])


def _side(value: int) -> Column:
    return F.lit(value).cast("bigint").alias(_SIDE)
