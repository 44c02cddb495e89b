"""Compare two tables of one schema: first by hashes of their rows, then, where hashes differ, row by row and
column by column.

Spark's own functions are not sufficient: its hash ignores nulls and array boundaries, its hash and its
equality do not distinguish 0.0 from -0.0, and it can neither hash nor compare maps. The canonical form made
here is a tuple of plain values at every depth, with a flag for each null and a length for each list, so rows
with equal hashes have equal content, except for hash collisions.

Rows are divided into buckets by key, and the row hashes of each bucket are summed for each side. The sums
need neither a shuffle nor a sort of the rows. A missing, duplicate or different row changes the sum of its
bucket. Only rows of buckets with different sums are joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, DataType, DoubleType, FloatType, MapType, StructType

from penstock.change import EXACT
from penstock.schema import TableName, TableSchema
from penstock.sinks.dataframes import quoted


def canonical(column: Column, data_type: DataType) -> Column:
    """Return the canonical form of `column`, to be compared with `eqNullSafe`. It is null where the column is
    null.
    """
    if isinstance(data_type, (FloatType, DoubleType)):
        return F.when(column.isNotNull(), F.struct(column, F.when(column == 0, column.cast("string"))))
    if isinstance(data_type, ArrayType):
        element = data_type.elementType
        return F.when(
            column.isNotNull(),
            F.struct(F.size(column), F.transform(column, lambda each: _flagged(each, element))),
        )
    if isinstance(data_type, MapType):
        entries = StructType().add("key", data_type.keyType).add("value", data_type.valueType)
        return canonical(F.sort_array(F.map_entries(column)), ArrayType(entries))
    if isinstance(data_type, StructType):
        fields = [
            _flagged(column.getField(field.name), field.dataType).alias(f"_{at}")
            for at, field in enumerate(data_type.fields)
        ]
        return F.when(column.isNotNull(), F.struct(*fields))
    return column


def row_hash(columns: Sequence[tuple[Column, DataType]]) -> Column:
    """Return a 64-bit hash of the whole row."""
    return F.xxhash64(
        *(part for column, data_type in columns for part in (column.isNull(), canonical(column, data_type)))
    )


def shown(column: Column, data_type: DataType) -> Column:
    """Return `column` as text for reports. Null stays null."""
    if isinstance(data_type, BinaryType):
        return F.concat(F.lit("\\x"), F.lower(F.hex(column)))
    if isinstance(data_type, (ArrayType, MapType, StructType)):
        return F.to_json(column)
    return column.cast("string")


def count_rows(rows: pa.Table) -> Counter[tuple[Hashable, ...]]:
    """Count rows by content. Rows are equal here exactly if Spark finds them equal by `canonical`."""
    return Counter(zip(*(_plain(column.combine_chunks()) for column in rows.columns), strict=True))


def _plain(values: pa.Array) -> list[Hashable]:
    """Convert values, which may be nested, to plain Python values that can be hashed. Null becomes None.
    Times become numbers, because Python's datetime has only the years 1 to 9999.
    """
    kind = values.type
    if pa.types.is_floating(kind):
        # 0.0 and -0.0 have different texts, and all NaN have the same.
        return [None if each is None else repr(each) for each in values.to_pylist()]
    if pa.types.is_map(kind):
        keys, items = _plain(values.keys), _plain(values.items)
        return [
            None if span is None else frozenset(zip(keys[span], items[span], strict=True))
            for span in _spans(values)
        ]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _plain(values.values)
        return [None if span is None else tuple(inner[span]) for span in _spans(values)]
    if pa.types.is_struct(kind):
        is_there = pc.is_valid(values).to_pylist()
        fields = (
            zip(*(_plain(values.field(at)) for at in range(kind.num_fields)), strict=True)
            if kind.num_fields
            else ((),) * len(values)
        )
        return [tuple(each) if there else None for there, each in zip(is_there, fields, strict=True)]
    if pa.types.is_temporal(kind):
        return list(values.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist())
    return list(values.to_pylist())


def _spans(values: pa.Array) -> list[slice | None]:
    """Return the index range of each list's inner values; None for a null list."""
    offsets, is_there = values.offsets.to_pylist(), pc.is_valid(values).to_pylist()
    return [slice(offsets[at], offsets[at + 1]) if there else None for at, there in enumerate(is_there)]


def _flagged(column: Column, data_type: DataType) -> Column:
    return F.struct(column.isNull().alias("n"), canonical(column, data_type).alias("v"))


EXAMPLES = 5
"""Number of examples for each kind of difference: the first ones in key order."""

_BUCKETS = 4096
_HALF = 32
_HELD = "key of a letter"
_KEY, _HASH, _BUCKET, _ROW, _SIDE, _TURN = "key", "hash", "bucket", "row", "side", "turn"


@dataclass(frozen=True, slots=True)
class ColumnDifference:
    """One column of a different row: its value on each side, as text; None is null."""

    column: str
    source: str | None
    target: str | None


@dataclass(frozen=True, slots=True)
class RowDifference:
    """One row that differs. `kind` is `missing`, `extra` or `different`, from the target's point of view."""

    kind: str
    key: dict[str, str | None]
    columns: tuple[ColumnDifference, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of one table. All counts are exact; `examples` are the first of each kind."""

    table: TableName
    source_rows: int
    target_rows: int
    missing: int = 0
    extra: int = 0
    different: int = 0
    columns: dict[str, int] = field(default_factory=dict)
    """For each column, the number of rows in which its values differ."""
    examples: tuple[RowDifference, ...] = ()
    has_equal_digests: bool = True
    held: int = 0
    """Number of keys in the dead-letter queue. Their rows are neither compared nor counted."""

    @property
    def equal(self) -> bool:
        return self.equal_but_held and not self.held

    @property
    def equal_but_held(self) -> bool:
        """Whether all compared rows are equal, so that only rows in the dead-letter queue may differ."""
        return self.has_equal_digests and self.source_rows == self.target_rows


@dataclass(frozen=True, slots=True)
class TableComparer:
    """Compares one table with Spark. Both sides use the same expressions."""

    schema: TableSchema
    types: dict[str, DataType]

    def compare(self, source: DataFrame, target: DataFrame, held: DataFrame | None = None) -> Comparison:
        """Compare the rows of two sides. Reads both sides once, and rows of buckets with different sums
        again. Excludes rows whose key is in `held`, and counts these keys separately.
        """
        if held is not None:
            keys = held.select(F.struct(*self._key()).alias(_HELD)).distinct()
            is_held = F.struct(*self._key()).eqNullSafe(keys[_HELD])
            left, right = (frame.join(F.broadcast(keys), is_held, "left_anti") for frame in (source, target))
            return replace(self.compare(left, right), held=keys.count())
        sums = self._digests(source, target)
        counted = Comparison(
            self.schema.name,
            sum(each["source_rows"] for each in sums),
            sum(each["target_rows"] for each in sums),
        )
        buckets = [
            each[_BUCKET]
            for each in sums
            if each["high"] or each["low"] or each["source_rows"] != each["target_rows"]
        ]
        return self._describe(counted, source, target, buckets) if buckets else counted

    # the sums
    # --------------------------------------------------------------------------------------------------------

    def _digests(self, source: DataFrame, target: DataFrame) -> list[Any]:
        """Return for each bucket the row counts of both sides, and the difference between their hash sums in
        two halves.

        A sum of 64-bit hashes would overflow. Sums of their 32-bit halves do not, up to two billion rows.
        """
        hashes = [
            frame.select(self._bucket(), self._hash(), _side(value))
            for frame, value in ((source, 1), (target, -1))
        ]
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
        """The columns that identify a row; for a table without a key, the hash of all columns. `_exact` is
        included, because it has the key values that the type of the key column cannot hold.
        """
        names = self.schema.key
        if not names:
            return [self._hash()]
        return [F.col(quoted(name)) for name in names] + [
            F.col(EXACT)[name].alias(f"{name} exactly") for name in names
        ]

    def _bucket(self) -> Column:
        return F.pmod(F.xxhash64(*self._key()), F.lit(_BUCKETS)).alias(_BUCKET)

    # the rows
    # --------------------------------------------------------------------------------------------------------

    def _describe(
        self, counted: Comparison, source: DataFrame, target: DataFrame, buckets: Sequence[int]
    ) -> Comparison:
        pairs = self._pairs(source, target, buckets).cache()
        try:
            found = {row["kind"]: row for row in self._counts(pairs)}
            examples = self._examples(pairs)
        finally:
            pairs.unpersist()
        missing, extra, different = (
            found[kind]["rows"] if kind in found else 0 for kind in ("missing", "extra", "different")
        )
        columns = found["different"]["columns"] if different else []
        named = {name: count for name, count in zip(self._columns(), columns, strict=False) if count}
        return Comparison(
            counted.table,
            counted.source_rows,
            counted.target_rows,
            missing,
            extra,
            different,
            named,
            examples,
            has_equal_digests=False,
        )

    def _pairs(self, source: DataFrame, target: DataFrame, buckets: Sequence[int]) -> DataFrame:
        """Return the rows without an equal row on the other side, joined by key. Column `l` has the source's
        row, `r` the target's.
        """
        sides = [self._rows(frame, side, buckets) for frame, side in ((source, 1), (target, -1))]
        rows = sides[0].unionAll(sides[1])
        side = F.col(_SIDE)
        alike = Window.partitionBy(_KEY, _HASH)
        surplus = (
            rows.withColumn("balance", F.sum(side).over(alike))
            .withColumn(_TURN, F.row_number().over(Window.partitionBy(_KEY, _HASH, _SIDE).orderBy(F.lit(0))))
            .where((side * F.col("balance") > 0) & (F.col(_TURN) <= F.abs("balance")))
            # Rows with the same key are numbered and joined in that order.
            .withColumn(_TURN, F.row_number().over(Window.partitionBy(_KEY, _SIDE).orderBy(_HASH)))
        )
        sides_of_pair = [
            F.first(F.when(side == value, F.col(_ROW)), ignorenulls=True).alias(name)
            for name, value in (("l", 1), ("r", -1))
        ]
        kind = (
            F.when(F.col("r").isNull(), "missing")
            .when(F.col("l").isNull(), "extra")
            .otherwise("different")
            .alias("kind")
        )
        return surplus.groupBy(_KEY, _TURN).agg(*sides_of_pair).select(_KEY, "l", "r", kind)

    def _rows(self, frame: DataFrame, side: int, buckets: Sequence[int]) -> DataFrame:
        if len(buckets) < _BUCKETS:
            frame = frame.where(self._bucket().isin(*buckets))
        row = F.struct(
            *(F.col(quoted(name)).alias(f"_{at}") for at, name in enumerate(self._columns()))
        ).alias(_ROW)
        return frame.select(F.struct(*self._key()).alias(_KEY), self._hash(), row, _side(side))

    def _differs(self, at: int, name: str) -> Column:
        left, right = (canonical(F.col(f"{side}._{at}"), self.types[name]) for side in ("l", "r"))
        return ~left.eqNullSafe(right)

    def _counts(self, pairs: DataFrame) -> list[Any]:
        columns = [F.count_if(self._differs(at, name)) for at, name in enumerate(self._columns())]
        return (
            pairs.groupBy("kind")
            .agg(F.count(F.lit(1)).alias("rows"), F.array(*columns).alias("columns"))
            .collect()
        )

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
        differing = F.when(
            F.col("kind") == "different", F.filter(F.array(*columns), lambda each: each.isNotNull())
        ).alias("columns")
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
        """Return a value as text. If the type cannot hold the value, this is the exact text."""
        name = self._columns()[at]
        text = shown(F.col(f"{side}._{at}"), self.types[name])
        return (
            text
            if name == EXACT
            else F.coalesce(text, F.col(f"{side}._{len(self.schema.column_names)}")[name])
        )


def _side(value: int) -> Column:
    return F.lit(value).cast("bigint").alias(_SIDE)
