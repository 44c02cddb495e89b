"""Names and classes that the analysis of a transform's SELECT shares with the tasks that use its results.
Does not import pyspark, because executors load this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

VALUE: Final = "value"
"""Name of the one field of each result struct. The struct is null if the evaluation failed."""
WHERE: Final = "where"
"""Name of the column with the results of the condition. The results of the query's columns are in columns
named by their index: `0`, `1` …
"""


@dataclass(frozen=True, slots=True)
class Selected:
    """A column of a query's result."""

    name: str
    kind: str
    """Spark type as JSON."""
    needs: tuple[str, ...]
    """Source columns from which it is computed."""
    is_plain: bool = False
    """Whether it is a source column without computation, possibly renamed."""


@dataclass(frozen=True, slots=True)
class Analysis:
    columns: tuple[Selected, ...]
    condition_columns: tuple[str, ...] | None
    """Source columns that the condition uses; None if the query has no condition."""


def row_column(names: Sequence[str]) -> str:
    """Name of the column with the row number, in a file that also has columns with these names."""
    name = "_row"
    while name in names:
        name = f"_{name}"
    return name
