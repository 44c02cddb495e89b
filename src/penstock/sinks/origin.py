"""From which columns of the source the columns of a target are: kept with the target, so that whatever happens to the source's columns
later can be told by their numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from penstock.schema import Column, TableSchema
from penstock.sinks.lineage import Numbering


@dataclass(frozen=True, slots=True)
class OriginColumn:
    """A column of the source as it was last followed, and what it is called in the target; None: it is left out there."""

    name: str
    type_oid: int
    type_modifier: int
    target: str | None

    @classmethod
    def of(cls, column: Column, target: str | None) -> Self:
        return cls(column.name, column.type_oid, column.type_modifier, target)

    def is_like(self, column: Column) -> bool:
        return (self.name, self.type_oid, self.type_modifier) == (column.name, column.type_oid, column.type_modifier)


@dataclass(frozen=True, slots=True)
class Origin:
    columns: Mapping[int, OriginColumn]
    """By number, in the order of the table. What the target still has of columns that were dropped is not among them."""
    width: int
    heap: str
    """See `Attributes`."""
    made_by: str = ""
    """The transform that made the target's columns of these, which then are none of its own; empty if there was none."""

    @classmethod
    def of(cls, schema: TableSchema) -> Self | None:
        """Of a target that has all columns under their own names. None: the catalog was not asked for their numbers."""
        attributes = schema.attributes
        if attributes is None or not attributes.width:
            return None
        columns = schema.columns if attributes.source is None else attributes.source
        if len(attributes.numbers) != len(columns):
            return None
        named = [OriginColumn.of(column, column.name if attributes.source is None else None) for column in columns]
        return cls(dict(zip(attributes.numbers, named, strict=True)), attributes.width, attributes.heap, attributes.made_by)

    @classmethod
    def parse(cls, text: str) -> Self:
        found: dict[str, Any] = json.loads(text)
        columns = {int(number): OriginColumn(*column) for number, column in found["columns"].items()}
        return cls(columns, int(found["width"]), str(found["heap"]), str(found.get("made_by", "")))

    def __str__(self) -> str:
        columns = {str(number): [each.name, each.type_oid, each.type_modifier, each.target] for number, each in self.columns.items()}
        document = {"width": self.width, "heap": self.heap, "columns": columns}
        made_by = {"made_by": self.made_by} if self.made_by else {}
        return json.dumps({**document, **made_by}, separators=(",", ":"), ensure_ascii=False)

    @property
    def numbering(self) -> Numbering:
        return Numbering(tuple(self.columns), self.width)

    def is_shape_of(self, schema: TableSchema) -> bool:
        """Whether the columns are called and declared as they were; they need not be the same for that."""
        return len(schema.columns) == len(self.columns) and all(
            known.is_like(column) for known, column in zip(self.columns.values(), schema.columns, strict=True)
        )

    def is_same(self, schema: TableSchema) -> bool:
        """Whether `schema`, with the catalog's numbers, has the very same columns."""
        return self.is_shape_of(schema) and schema.attributes is not None and schema.attributes.numbers == tuple(self.columns)

    def has_all_of(self, schema: TableSchema) -> bool:
        """Whether, by the catalog's numbers in `schema`, no column has come or gone: all that can have happened is that names changed."""
        attributes = schema.attributes
        return attributes is not None and (attributes.numbers, attributes.width) == (tuple(self.columns), self.width)

    def numbers_of(self, targets: tuple[str, ...]) -> frozenset[int]:
        """Of the columns that are called so in the target."""
        return frozenset(number for number, column in self.columns.items() if column.target in targets)
