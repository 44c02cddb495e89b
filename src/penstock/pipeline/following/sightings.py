"""What the catalog was seen to have, where the log has shown nothing of it: another shape of a table, or no such table any more.

Whatever the catalog shows happened before it answered, and all changes that were made before come up to a position that is known since
then (`CaptureSide.seen`). An epoch that ends there or later has every one of them, and none of an older shape is still to come: only such
an epoch may act on what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.position import Position
from penstock.schema import TableName, TableSchema


@dataclass(frozen=True, slots=True)
class Look:
    """What the catalog has: the tables' shapes; up to where all changes come that were made before; of tables that are no more, what became
    of them; and those whose rows came or went in another way than the log shows, with the reason."""

    schemas: Mapping[TableName, TableSchema]
    seen_at: Position | None = None
    gone: Mapping[TableName, str] = field(default_factory=dict)
    moved: Mapping[TableName, str] = field(default_factory=dict)


@dataclass(slots=True)
class Sightings:
    """Written by the pipeline's main thread, read by epochs."""

    _shapes: dict[TableName, tuple[Position, TableSchema]] = field(default_factory=dict)
    _gone: dict[TableName, tuple[Position, str]] = field(default_factory=dict)

    def see(self, name: TableName, schema: TableSchema, at: Position) -> None:
        self._gone.pop(name, None)
        known = self._shapes.get(name)
        if known is None or not is_same_shape(known[1], schema):
            self._shapes[name] = (at, schema)

    def miss(self, name: TableName, reason: str, at: Position) -> None:
        self._shapes.pop(name, None)
        self._gone.setdefault(name, (at, reason))

    def forget(self, name: TableName) -> None:
        self._shapes.pop(name, None)
        self._gone.pop(name, None)

    def shape(self, name: TableName, end: Position | None) -> TableSchema | None:
        """For an epoch that ends at `end`; None: for any."""
        at, schema = self._shapes.get(name, (None, None))
        return schema if at is not None and (end is None or at <= end) else None

    def gone(self, name: TableName, end: Position | None) -> str | None:
        """Why the table is no more."""
        at, reason = self._gone.get(name, (None, None))
        return reason if at is not None and (end is None or at <= end) else None


def is_same_shape(one: TableSchema, other: TableSchema) -> bool:
    """The very same columns, called and declared alike."""
    return one == other and _numbers(one) == _numbers(other)


def _numbers(schema: TableSchema) -> object:
    return None if schema.attributes is None else (schema.attributes.numbers, schema.attributes.width)
