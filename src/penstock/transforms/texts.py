"""Values as plain text, and columns that travel as the source's own text with the types that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.policy import TypePolicy
from penstock.postgres.types.registry import TEXT, builtin_reader, text_type
from penstock.schema import Column


def is_text_form(column: Column) -> bool:
    """Whether its values are the source's own text, whatever type they have there: on the way to another Postgres."""
    return column.reader == TEXT


def typed(column: Column) -> Column:
    """The column as it would be if values had types; that of an enum, or of an extension, is text."""
    if not is_text_form(column):
        return column
    reader = builtin_reader(column.type_oid) or TEXT
    return replace(column, arrow_type=text_type(reader).arrow_type(column.type_modifier, TypePolicy.DEFAULT), reader="")


def plain_text(values: pa.Array) -> pa.Array:
    """Plain values as Spark writes them, and Postgres reads them. No floats: everybody writes these in a way of his own."""
    if pa.types.is_string(values.type):
        return values
    if pa.types.is_decimal(values.type):
        return by_value(values, lambda value: f"{value:f}", pa.string())
    if pa.types.is_timestamp(values.type):
        # Arrow, unlike Python, writes years after 9999 as well, which Spark can compute.
        return pc.replace_substring_regex(values.cast(pa.string()), r"\.?0*Z?$", "")
    return values.cast(pa.string())


def array_text(values: pa.Array) -> pa.Array:
    """Lists of texts, as Postgres reads an array."""
    return pa.array([None if each is None else _array_text(each) for each in values.to_pylist()], pa.string())


def with_elements(values: pa.ListArray, elements: pa.Array) -> pa.ListArray:
    """The same lists with other elements, one for each of `values.flatten()`."""
    lengths = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    return pa.ListArray.from_arrays(offsets, elements, mask=values.is_null() if values.null_count else None)


def by_value(values: pa.Array, function: Callable[..., object], arrow_type: pa.DataType) -> pa.Array:
    """`function` of each value, called once for all that are equal. Null stays null."""
    encoded = values.dictionary_encode()
    return pa.array([function(value) for value in encoded.dictionary.to_pylist()], arrow_type).take(encoded.indices)


def _array_text(values: list[str | None]) -> str:
    return "{" + ",".join("NULL" if value is None else f'"{_escaped(value)}"' for value in values) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
