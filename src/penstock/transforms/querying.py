"""Queries made to fit a table: Spark says what their columns are, and here it is seen whether a target can have them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pyarrow as pa

from penstock.schema import TableSchema
from penstock.spark.query import Analysis, Selected
from penstock.transforms.columns import MadeColumn
from penstock.transforms.computed import Computed, read_kind
from penstock.transforms.texts import is_text_form, typed

Analyse = Callable[[str, tuple[tuple[str, pa.DataType], ...]], Analysis]
"""Says what a query over a table with these columns comes to. `ConfigError` if it cannot be run row by row, or not at all."""

TargetColumn = MadeColumn | Computed

_OF_NULL = "CAST(NULL AS …) gives null a type"
_OF_OTHERS = "to_json(…) makes a text of it, CAST(… AS …) another type"
_UNNAMED = re.compile(r"[\s(){},;=]")


def ask_spark(text: str, columns: tuple[tuple[str, pa.DataType], ...]) -> Analysis:
    """Only in the driver, or in a process that has none: a Spark is started there."""
    from penstock.spark.query_session import analysed

    return analysed(text, columns)


def query_of(where: str) -> str:
    """A condition by itself as a query. It may end in a comment."""
    return f"SELECT * FROM source WHERE (\n{where}\n)"  # noqa: S608 - Spark is asked what it is, before anything is run


def spark_columns(source: TableSchema) -> tuple[tuple[str, pa.DataType], ...]:
    """The columns as a query sees them: typed, whatever form they travel in."""
    return tuple((column.name, typed(column).arrow_type) for column in source.columns)


def target_columns(analysis: Analysis, source: TableSchema) -> tuple[TargetColumn, ...]:
    """The columns that a query makes. `ValueError` with the reason, if no target can have one of them."""
    return tuple(_target_column(each, place, source) for place, each in enumerate(analysis.columns))


def _target_column(selected: Selected, place: int, source: TableSchema) -> TargetColumn:
    if selected.is_plain:
        return MadeColumn(next(column for column in source.columns if column.name == selected.needs[0]), selected.name)
    if _UNNAMED.search(selected.name):
        raise ValueError(f"column {selected.name!r} has no name: say {selected.name} AS …")
    arrow_type = read_kind(selected.kind)
    if arrow_type is None:
        remedy = (
            "CAST(NULL AS …) gives null a type" if selected.kind == '"void"' else "to_json(…) makes a text of it, CAST(… AS …) another type"
        )
        raise ValueError(f"column {selected.name!r} would have the type {selected.kind}, which targets do not have: {remedy}")
    return Computed(selected.name, place, selected.needs, arrow_type, any(map(is_text_form, source.columns)))
