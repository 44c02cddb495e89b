"""Polled tables: find them in the catalog, determine where polling of a new table begins, and keep the state
of each table.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from penstock.capture.polling.known_keys import KnownKeys
from penstock.capture.polling.settings import PollingSettings
from penstock.capture.settings import XMIN
from penstock.errors import PenstockError, SpoolCorruptError, TableError, TableRewrittenError
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_key_faults, inspect_schemas, inspect_tables
from penstock.postgres.connection import Connection
from penstock.postgres.consistent_read import ConsistentRead
from penstock.postgres.polled_tables import (
    EVERYTHING,
    PolledTable,
    Window,
    check_cursor,
    inspect_cursors,
    inspect_highest,
    read_keys_in_order,
    read_versions,
)
from penstock.postgres.queries import query
from penstock.schema import TableName

_MOST_KEPT = 1_000
"""The maximum number of row versions per table in a mark. Beyond it, some rows are delivered twice after a
restart.
"""

NONE_SEEN = pa.array([], pa.string())


@dataclass(frozen=True, slots=True, eq=False)
class TableState:
    """Where polling of a table resumes. If `how`, its polling method, changes, the table is read in full."""

    how: str
    window: Window = EVERYTHING
    seen: pa.StringArray = field(default_factory=lambda: NONE_SEEN)
    """The versions of rows in the window that have been returned."""
    keys: Position | None = None
    """The poll whose keys are stored; None without known keys."""

    def reset(self) -> TableState:
        """The state for a full read."""
        return replace(self, window=EVERYTHING, seen=NONE_SEEN)


@dataclass(frozen=True, slots=True, eq=False)
class PollingState:
    """The state in a mark. `system` identifies the server that the state is from: on another timeline the
    same transaction ids mean other transactions.
    """

    system: str
    reached: Position
    """The WAL position of the poll."""
    tables: Mapping[int, TableState] = field(default_factory=dict)
    """By OID."""

    def to_text(self) -> str:
        tables = {str(oid): _document(state) for oid, state in self.tables.items()}
        return json.dumps({"system": self.system, "reached": str(self.reached), "tables": tables})

    @classmethod
    def parse(cls, text: str) -> PollingState:
        try:
            document = json.loads(text)
            tables = {int(oid): _parse(state) for oid, state in document["tables"].items()}
            return cls(str(document["system"]), Position.parse(document["reached"]), tables)
        except (KeyError, TypeError, ValueError) as error:
            raise SpoolCorruptError(
                "the stored polling state cannot be parsed",
                hint="restore it from a backup, or copy the tables again",
            ) from error

    def to_texts(self) -> dict[int, str]:
        """The state of each table as text, for tables that are polled for the first time."""
        return {
            oid: json.dumps({"system": self.system, **_document(state)}) for oid, state in self.tables.items()
        }


def parse_begin(text: str, system: str) -> TableState:
    """The start state of a table; for another timeline, that of a full read."""
    document = json.loads(text)
    return _parse(document) if document["system"] == system else _parse(document).reset()


def _document(state: TableState) -> dict[str, object]:
    return {
        "how": state.how,
        "low": state.window.low,
        "horizon": state.window.horizon,
        "seen": state.seen.slice(0, _MOST_KEPT).to_pylist(),
        "keys": None if state.keys is None else str(state.keys),
    }


def _parse(document: Mapping[str, Any]) -> TableState:
    keys = document["keys"]
    return TableState(
        document["how"],
        Window(document["low"], document["horizon"]),
        pa.array(document["seen"], pa.string()),
        None if keys is None else Position.parse(keys),
    )


_MOST_SEEN = 1_000


def find_tables(
    connection: Connection, names: Collection[TableName], oids: Collection[int] = ()
) -> list[CatalogTable]:
    """The existing tables among these, by name or by OID."""
    return [table for table in inspect_tables(connection) if table.name in names or table.oid in oids]


@dataclass(frozen=True, slots=True)
class PolledTables:
    """Tables that can be polled, and why others cannot."""

    tables: list[PolledTable]
    refused: dict[TableName, PenstockError]

    def checked(self) -> list[PolledTable]:
        """Raise the first reason why a table cannot be polled."""
        for error in self.refused.values():
            raise error
        return self.tables


def inspect_polled(
    connection: Connection, settings: PollingSettings, tables: Sequence[CatalogTable]
) -> PolledTables:
    """The current schemas of the tables and their cursor columns."""
    oids = [table.oid for table in tables]
    schemas = inspect_schemas(connection, tables, settings.types)
    faults = inspect_key_faults(connection, schemas.values())
    cursors = inspect_cursors(connection, oids)
    partitioned = _inspect_partitioned(connection, tables)
    found = PolledTables([], {})
    for table in tables:
        schema, column = schemas[table.name], settings.rules.cursor_of(table.name)
        try:
            if table.name in faults:
                raise faults[table.name].error(table.name)
            cursor = (
                None if column == XMIN else check_cursor(table.name, column, cursors.get((table.oid, column)))
            )
        except TableError as error:
            found.refused[table.name] = error
        else:
            found.tables.append(PolledTable(schema, table.oid in partitioned, cursor))
    return found


def _inspect_partitioned(connection: Connection, tables: Sequence[CatalogTable]) -> set[int]:
    """The tables that have partitions. The tables were found before they were locked, so their names are
    checked again.
    """
    rows: list[Any] = connection.execute(
        query("polling", "tables"), {"oids": [table.oid for table in tables]}
    ).fetchall()
    names = {oid: TableName(schema, name) for oid, schema, name, _ in rows}
    for table in tables:
        if names.get(table.oid) != table.name:
            raise TableRewrittenError(f"table {table.name} was renamed or dropped during the poll")
    return {oid for oid, _, _, is_partitioned in rows if is_partitioned}


def begin_table(
    connection: Connection, table: PolledTable, read: ConsistentRead, keys: KnownKeys | None
) -> TableState:
    """The start state of a table: everything that this read does not see will be returned, and little else.
    Transactions that are open at the read may write cursor values below existing ones; so until they have
    ended, a table with a cursor is polled by `xmin` too.
    """
    low = None if table.cursor is None else inspect_highest(connection, table)
    window = Window(low, read.xmin)
    seen = read_versions(connection, table, window, read, _MOST_SEEN)
    if keys is not None:
        keys.store(table.schema, read.position, read_keys_in_order(connection, table))
    return TableState(table.how, window, seen, read.position if keys is not None else None)
