"""A table as the catalog has it right now, with what is needed to tell what became of its columns since another moment.

All of it is of one moment, and never of the past: it says in what the shapes that the log shows must have ended, not what they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.postgres.catalog import CatalogTable, inspect_schema
from penstock.postgres.connection import Connection
from penstock.postgres.queries import query
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableSchema

_XIDS = 1 << 32


@dataclass(frozen=True, slots=True)
class MissingValue:
    """What rows have in a column that was added after them, in the place of a value that they do not hold."""

    text: str | None
    """None: it cannot be told, since heaps of the table differ in it."""


@dataclass(frozen=True, slots=True)
class CatalogShape:
    schema: TableSchema
    """With `attributes`. No columns: the table is gone."""
    missing: Mapping[str, MissingValue]
    """By column, of those that have one. The server forgets them when it rewrites the rows, which then hold the values themselves."""
    next_xid: int
    unfinished: frozenset[int]

    def shows(self, xid: int) -> bool:
        """Whether what this transaction did is part of the shape: the log may show a commit before anybody sees what it did."""
        # A change has 32 bits of it; half of all numbers are past, the others are to come.
        past = (self.next_xid - xid) % _XIDS
        return 0 < past <= _XIDS // 2 and self.next_xid - past not in self.unfinished


def inspect_shape(
    connection: Connection, table: CatalogTable, policy: TypePolicy | None = None, publication: str | None = None
) -> CatalogShape:
    """Look at one table. Waits for whoever has one of the published tables to himself."""
    with connection.transaction():
        connection.execute(query("attributes", "one_moment"))
        row: Any = connection.execute(query("attributes", "unfinished")).fetchone()
        schema = inspect_schema(connection, table, policy, publication)
        found: list[Any] = connection.execute(query("attributes", "missing"), {"oid": table.oid}).fetchall()
    missing = {name: MissingValue(texts[0] if is_everywhere and len(texts) == 1 else None) for name, texts, is_everywhere in found}
    return CatalogShape(schema, missing, row[0], frozenset(row[1]))
