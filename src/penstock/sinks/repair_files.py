"""Column names of the files that describe a snapshot repair: the keys that changed, and their current rows.

See `ChangedRows`. Executors read and write these files, so this module does not import Spark.
"""

from __future__ import annotations

import pyarrow as pa

from penstock.change import EXACT, EXACT_TYPE


def value_column(index: int) -> str:
    """The name of the column with the values of the table's column number `index`. It does not contain the
    table's own column name, which could conflict with the other names in the file.
    """
    return f"value_{index}"


def match_column(index: int) -> str:
    """The name of the column with the values of key column number `index`."""
    return f"match_{index}"


def match_text_column(index: int) -> str:
    """The name of the column with the exact texts of key values that the key column's type cannot hold."""
    return f"match_text_{index}"


def text_column(index: int) -> str:
    """The name of the column with key values as text that the source can parse."""
    return f"text_{index}"


def row_schema(columns: pa.Schema) -> pa.Schema:
    """The schema of the files in `ChangedRows.rows`."""
    fields = [pa.field(value_column(index), field.type) for index, field in enumerate(columns)]
    return pa.schema([*fields, pa.field(EXACT, EXACT_TYPE)])
