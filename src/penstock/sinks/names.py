"""Writing names and types for Spark SQL, and names for directories."""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import quote

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


def directory_name(name: str) -> str:
    """Different names give different directories. The escape is a tilde, since delta-rs takes a percent sign in a path for its own."""
    escaped = quote(name, safe=" ").replace("~", "~7E").replace("%", "~")
    return f"~2E{escaped[1:]}" if escaped.startswith(".") else escaped


def folds_case(directory: Path) -> bool:
    """Whether names in this directory that differ only in case are one and the same."""
    with tempfile.NamedTemporaryFile(prefix=".penstock-case-", dir=directory) as probe:
        path = Path(probe.name)
        return path.with_name(path.name.swapcase()).exists()
