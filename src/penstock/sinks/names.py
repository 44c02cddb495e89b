"""Writing names and types for Spark SQL."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type


def quoted(name: str) -> str:
    """A name in backticks, whatever it holds."""
    escaped = name.replace("`", "``")
    return f"`{escaped}`"


def sql_type(arrow_type: pa.DataType) -> str:
    """The Spark SQL type of an Arrow type, as it stands in a column definition."""
    return str(from_arrow_type(arrow_type, prefer_timestamp_ntz=True).simpleString())


def text_literal(text: str) -> str:
    """A string literal of Spark SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
