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
"""The maximum number of row versions per table in a mark. With more of them, some rows are delivered twice
after a restart.
"""

NONE_SEEN = pa.array([], pa.string())


@dataclass(frozen=True, slots=True, eq=False)
class TableState:
    """The state from which the next poll of a table continues. `how` identifies the polling method (the
    cursor column, or `xmin`) for which the state is valid. With another polling method, the table is read in
    full.
    """

    how: str
    window: Window = EVERYTHING
    seen: pa.StringArray = field(default_factory=lambda: NONE_SEEN)
    """The versions of the rows in `window` that earlier polls have returned."""
    keys: Position | None = None
    """The position of the poll whose keys are stored in `KnownKeys`; None if no keys are stored."""

    def reset(self) -> TableState:
        """Return the state for a full read."""
        return replace(self, window=EVERYTHING, seen=NONE_SEEN)


@dataclass(frozen=True, slots=True, eq=False)
class PollingState:
    """The state that a mark contains. `system` identifies the server and timeline on which the state was
    made: on another timeline the same transaction ids belong to other transactions.
    """

    system: str
    reached: Position
    """The WAL position of the poll."""
    tables: Mapping[int, TableState] = field(default_factory=dict)
    """The state of each table, by OID."""

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
        """Return the state of each table as text, by OID, to be stored for tables that are polled for the
        first time.
        """
        return {
            oid: json.dumps({"system": self.system, **_document(state)}) for oid, state in self.tables.items()
        }


def parse_begin(text: str, system: str) -> TableState:
    """Parse the start state of a table. If the state is from another server or timeline than `system`, the
    result is a state for a full read.
    """
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
    """Return the existing tables that have one of these names or OIDs."""
    return [table for table in inspect_tables(connection) if table.name in names or table.oid in oids]


@dataclass(frozen=True, slots=True)
class PolledTables:
    """The tables that can be polled and, for each of the others, the error that says why it cannot be."""

    tables: list[PolledTable]
    refused: dict[TableName, PenstockError]

    def checked(self) -> list[PolledTable]:
        """Return the tables; raises the first error if a table cannot be polled."""
        for error in self.refused.values():
            raise error
        return self.tables


def inspect_polled(
    connection: Connection, settings: PollingSettings, tables: Sequence[CatalogTable]
) -> PolledTables:
    """Inspect the tables' current schemas and cursor columns. The result says which of the tables can be
    polled.
    """
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
    """Return the OIDs of the tables that have partitions. Raises an error if a table was renamed or dropped
    after `tables` were found and before they were locked.
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
    """Return the start state of a table: later polls return all rows that this read does not see, and few
    others. Transactions that are open at the read may write cursor values below existing ones. So until they
    have ended, a table with a cursor column is polled by `xmin` too.
    """
    low = None if table.cursor is None else inspect_highest(connection, table)
    window = Window(low, read.xmin)
    seen = read_versions(connection, table, window, read, _MOST_SEEN)
    if keys is not None:
        keys.store(table.schema, read.position, read_keys_in_order(connection, table))
    return TableState(table.how, window, seen, read.position if keys is not None else None)
