"""What is said between those who ask Spark to work out a query on rows, and Spark. No import of it here: executors read this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

VALUE: Final = "value"
"""The one field of the struct that an answer is; the struct is null where Spark met an error."""
WHERE: Final = "where"
"""The column with the answers of the condition. Those of a query's columns are called by their place."""


@dataclass(frozen=True, slots=True)
class Selected:
    """One column of a query."""

    name: str
    kind: str
    """Its type, as Spark writes it in JSON."""
    needs: tuple[str, ...]
    """The source's columns that it is made of."""
    is_plain: bool = False
    """Whether it is one of them as it is, under whatever name."""


@dataclass(frozen=True, slots=True)
class Analysis:
    columns: tuple[Selected, ...]
    asked: tuple[str, ...] | None
    """The source's columns that the condition depends on; None: there is no condition."""


def row_column(names: Sequence[str]) -> str:
    """What the number of a row is called in files, beside columns of these names."""
    name = "_row"
    while name in names:
        name = f"_{name}"
    return name
