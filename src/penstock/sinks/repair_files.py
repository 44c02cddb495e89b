"""Column names of the files that describe a snapshot repair: the keys that changed, and their current rows.

See `ChangedRows`. Executors read and write these files, so this module does not import Spark.
"""

from __future__ import annotations

import pyarrow as pa

from penstock.change import EXACT, EXACT_TYPE


def value_column(index: int) -> str:
    """A column of the table, by number: no name of the table can then conflict with the names here."""
    return f"value_{index}"


def match_column(index: int) -> str:
    """A column of the key, by its place in the key."""
    return f"match_{index}"


def match_text_column(index: int) -> str:
    """The exact text of a key value that its column's type cannot hold."""
    return f"match_text_{index}"


def text_column(index: int) -> str:
    """A key value as the source reads it."""
    return f"text_{index}"


def row_schema(columns: pa.Schema) -> pa.Schema:
    """The schema of the files in `ChangedRows.rows`."""
    fields = [pa.field(value_column(index), field.type) for index, field in enumerate(columns)]
    return pa.schema([*fields, pa.field(EXACT, EXACT_TYPE)])
