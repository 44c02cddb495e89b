"""Where tables go that do not go into one of their own name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.schema import TableName

SOURCE_COLUMN = "_source"


@dataclass(frozen=True, slots=True)
class Route:
    into: TableName
    source_column: str


def check_routes(routes: Iterable[Route | None]) -> None:
    """One table has one column that says from where its rows are."""
    columns: dict[TableName, str] = {}
    for route in routes:
        if route is not None and columns.setdefault(route.into, route.source_column) != route.source_column:
            both = f"{columns[route.into]!r} and {route.source_column!r}"
            raise ValueError(f"rules that route into {route.into} say different things of its source_column: {both}")
