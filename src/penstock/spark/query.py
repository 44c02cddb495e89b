"""Names and values shared by the analysis of row queries and the tasks that use its results. Does not import
pyspark, because executors load this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

VALUE: Final = "value"
"""Name of the one field of each result struct. The struct is null if the evaluation failed."""
WHERE: Final = "where"
"""Column with the results of the condition. Results of the query's columns are named by their index."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A column of a query's result."""

    name: str
    kind: str
    """Spark type as JSON."""
    needs: tuple[str, ...]
    """Source columns that it is computed from."""
    is_plain: bool = False
    """Whether it is a source column without computation, possibly renamed."""


@dataclass(frozen=True, slots=True)
class Analysis:
    columns: tuple[Selected, ...]
    condition_columns: tuple[str, ...] | None
    """Source columns of the condition; None without a condition."""


def row_column(names: Sequence[str]) -> str:
    """Name of the row number column in files that also have columns with these names."""
    name = "_row"
    while name in names:
        name = f"_{name}"
    return name
