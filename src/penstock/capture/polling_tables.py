"""The tables that a polling capture asks, as the catalog has them, and where one begins that has never been asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.capture.known_keys import KnownKeys
from penstock.capture.polling_rules import XMIN
from penstock.capture.polling_settings import PollingSettings
from penstock.capture.polling_state import TableState
from penstock.errors import PenstockError, TableError, TableRewrittenError
from penstock.postgres.catalog import CatalogTable, inspect_key_faults, inspect_schemas, inspect_tables
from penstock.postgres.connection import Connection
from penstock.postgres.moments import Moment
from penstock.postgres.polled import PolledTable, Window, check_cursor, inspect_cursors, inspect_highest, read_keys_in_order, read_versions
from penstock.postgres.queries import query
from penstock.schema import TableName

_MOST_SEEN = 1_000


def find_tables(connection: Connection, names: Collection[TableName], oids: Collection[int] = ()) -> list[CatalogTable]:
    """Those that are there, by name or by OID."""
    return [table for table in inspect_tables(connection) if table.name in names or table.oid in oids]


@dataclass(frozen=True, slots=True)
class PolledTables:
    """Tables that can be asked, and why others cannot."""

    tables: list[PolledTable]
    refused: dict[TableName, PenstockError]

    def checked(self) -> list[PolledTable]:
        """Raise the first reason why one of them cannot be asked."""
        for error in self.refused.values():
            raise error
        return self.tables


def inspect_polled(connection: Connection, settings: PollingSettings, tables: Sequence[CatalogTable]) -> PolledTables:
    """Their shapes now, and what they are asked by."""
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
            cursor = None if column == XMIN else check_cursor(table.name, column, cursors.get((table.oid, column)))
        except TableError as error:
            found.refused[table.name] = error
        else:
            found.tables.append(PolledTable(schema, table.oid in partitioned, cursor))
    return found


def _inspect_partitioned(connection: Connection, tables: Sequence[CatalogTable]) -> set[int]:
    """Which of them have partitions. They were found before they were locked, and may have given their names to others in between."""
    rows: list[Any] = connection.execute(query("polling", "tables"), {"oids": [table.oid for table in tables]}).fetchall()
    names = {oid: TableName(schema, name) for oid, schema, name, _ in rows}
    for table in tables:
        if names.get(table.oid) != table.name:
            raise TableRewrittenError(f"table {table.name} was renamed or dropped while it was being looked at")
    return {oid for oid, _, _, is_partitioned in rows if is_partitioned}


def begin_table(connection: Connection, table: PolledTable, moment: Moment, keys: KnownKeys | None) -> TableState:
    """Where a table begins: whatever this moment does not see will be given out, and little else.

    Transactions that are open at the moment may write values of its column that are lower than some that are there; so until they have
    ended, a table that is asked by a column is asked by `xmin` too.
    """
    low = None if table.cursor is None else inspect_highest(connection, table)
    window = Window(low, moment.xmin)
    seen = read_versions(connection, table, window, moment, _MOST_SEEN)
    if keys is not None:
        keys.store(table.schema, moment.position, read_keys_in_order(connection, table))
    return TableState(table.how, window, seen, moment.position if keys is not None else None)
