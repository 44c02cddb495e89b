"""Names of columns that Iceberg keeps for itself: no table may be read that has one of them.

One of those is the one that the mode `soft_delete` adds. In the table it has another name; everything of ours knows it by its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from penstock.errors import SinkRefusedError
from penstock.sinks.layout import DELETED, Layout, Mode

IS_DELETED = "_is_deleted"
_RESERVED = frozenset({"_file", "_pos", DELETED, "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number"})


def stored_name(name: str, mode: Mode) -> str:
    """What a column of the layout is called in the table."""
    return IS_DELETED if mode is Mode.SOFT_DELETE and name == DELETED else name


def own_names(columns: pa.Schema, mode: Mode) -> pa.Schema:
    """Columns of the table, as the layout calls them."""
    if mode is not Mode.SOFT_DELETE:
        return columns
    return pa.schema([field.with_name(DELETED) if field.name == IS_DELETED else field for field in columns])


def check_names(layout: Layout, place: str) -> None:
    """Raise if a column of the source cannot have its name there."""
    taken = _taken(layout.columns.names, _RESERVED | ({IS_DELETED} if layout.mode is Mode.SOFT_DELETE else set()))
    if taken is not None:
        raise SinkRefusedError(
            f"{place} cannot have a column named {taken!r}: Iceberg, or the mode {layout.mode} there, needs that name for itself",
            hint="rename the column, exclude the table, or leave the column out by a transform",
        )


def _taken(names: Iterable[str], reserved: frozenset[str]) -> str | None:
    return next((name for name in names if name.casefold() in reserved), None)
