"""Columns in a form in which Spark tells apart what differs, and nothing else.

Spark's hash passes over nulls and does not see where one array ends and the next begins, and neither its hash nor its equality tells 0.0
from -0.0; maps can be neither hashed nor compared. In the form that is made here, a value of any depth is a tuple of plain values, in which
every null is flagged and every list says how long it is; so two rows with one hash have one content, but for chance.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def _flagged(column: Column, data_type: DataType) -> Column:
    return F.struct(column.isNull().alias("n"), canonical(column, data_type).alias("v"))
