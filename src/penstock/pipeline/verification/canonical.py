"""Columns in a form in which Spark tells apart what differs, and nothing else.

Spark's hash passes over nulls and does not see where one array ends and the next begins, and neither its hash nor its equality tells 0.0
from -0.0; maps can be neither hashed nor compared. In the form that is made here, a value of any depth is a tuple of plain values, in which
every null is flagged and every list says how long it is; so two rows with one hash have one content, but for chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, DataType, DoubleType, FloatType, MapType, StructType


def canonical(column: Column, data_type: DataType) -> Column:
    """`column`, to be compared with `eqNullSafe`. Null where the column is null."""
    if isinstance(data_type, (FloatType, DoubleType)):
        return F.when(column.isNotNull(), F.struct(column, F.when(column == 0, column.cast("string"))))
    if isinstance(data_type, ArrayType):
        element = data_type.elementType
        return F.when(column.isNotNull(), F.struct(F.size(column), F.transform(column, lambda each: _flagged(each, element))))
    if isinstance(data_type, MapType):
        entries = StructType().add("key", data_type.keyType).add("value", data_type.valueType)
        return canonical(F.sort_array(F.map_entries(column)), ArrayType(entries))
    if isinstance(data_type, StructType):
        fields = [_flagged(column.getField(field.name), field.dataType).alias(f"_{at}") for at, field in enumerate(data_type.fields)]
        return F.when(column.isNotNull(), F.struct(*fields))
    return column


def row_hash(columns: Sequence[tuple[Column, DataType]]) -> Column:
    """64 bits that stand for the whole row."""
    return F.xxhash64(*(part for column, data_type in columns for part in (column.isNull(), canonical(column, data_type))))


def shown(column: Column, data_type: DataType) -> Column:
    """`column` as a text for people; null stays null."""
    if isinstance(data_type, BinaryType):
        return F.concat(F.lit("\\x"), F.lower(F.hex(column)))
    if isinstance(data_type, (ArrayType, MapType, StructType)):
        return F.to_json(column)
    return column.cast("string")


def count_rows(rows: pa.Table) -> Counter[tuple[Hashable, ...]]:
    """How often each row is there, in a form in which two rows are equal exactly where Spark finds them equal by `canonical`."""
    return Counter(zip(*(_plain(column.combine_chunks()) for column in rows.columns), strict=True))


def _plain(values: pa.Array) -> list[Hashable]:
    """Values of any depth as plain ones of Python; None is null. Times stay numbers: Python has none before the year 1 or after 9999."""
    kind = values.type
    if pa.types.is_floating(kind):
        # 0.0 and -0.0 have different texts, and all NaN have the same.
        return [None if each is None else repr(each) for each in values.to_pylist()]
    if pa.types.is_map(kind):
        keys, items = _plain(values.keys), _plain(values.items)
        return [None if span is None else frozenset(zip(keys[span], items[span], strict=True)) for span in _spans(values)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _plain(values.values)
        return [None if span is None else tuple(inner[span]) for span in _spans(values)]
    if pa.types.is_struct(kind):
        is_there = pc.is_valid(values).to_pylist()
        fields = zip(*(_plain(values.field(at)) for at in range(kind.num_fields)), strict=True) if kind.num_fields else ((),) * len(values)
        return [tuple(each) if there else None for there, each in zip(is_there, fields, strict=True)]
    if pa.types.is_temporal(kind):
        return list(values.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist())
    return list(values.to_pylist())


def _spans(values: pa.Array) -> list[slice | None]:
    """Where the inner values of each list are; None: it is null."""
    offsets, is_there = values.offsets.to_pylist(), pc.is_valid(values).to_pylist()
    return [slice(offsets[at], offsets[at + 1]) if there else None for at, there in enumerate(is_there)]


def _flagged(column: Column, data_type: DataType) -> Column:
    return F.struct(column.isNull().alias("n"), canonical(column, data_type).alias("v"))
