"""The tables that a polling capture asks, as the catalog has them, and where one begins that has never been asked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from penstock.capture.known_keys import KnownKeys
from penstock.capture.polling_rules import XMIN
from penstock.capture.polling_settings import PollingSettings
from penstock.capture.polling_state import TableState
from penstock.postgres.catalog import CatalogTable, KeyFault, inspect_key_faults, inspect_schemas, inspect_tables
from penstock.postgres.connection import Connection
from penstock.postgres.moments import Moment
from penstock.postgres.polled import PolledTable, Window, inspect_cursors, inspect_highest, read_keys_in_order, read_versions
from penstock.postgres.queries import query
from penstock.schema import TableName

_MOST_SEEN = 1_000


def find_tables(connection: Connection, names: Collection[TableName], oids: Collection[int] = ()) -> list[CatalogTable]:
    """Those that are there, by name or by OID."""
    return [table for table in inspect_tables(connection) if table.name in names or table.oid in oids]


def inspect_polled(connection: Connection, settings: PollingSettings, tables: Sequence[CatalogTable]) -> list[PolledTable]:
    """Their shapes now, and what they are asked by. Raises if one of them cannot be."""
    schemas = inspect_schemas(connection, tables, settings.types)
    faults = inspect_key_faults(connection, schemas.values())
    for name, schema in schemas.items():
        if not schema.key:
            raise faults.get(name, KeyFault.MISSING).error(name)
    wanted = {table.oid: (table.name, settings.rules.cursor_of(table.name)) for table in tables}
    cursors = inspect_cursors(connection, {oid: (name, column) for oid, (name, column) in wanted.items() if column != XMIN})
    rows: list[Any] = connection.execute(query("polling", "partitioned"), {"oids": list(wanted)}).fetchall()
    partitioned = {oid for (oid,) in rows}
    return [PolledTable(schemas[table.name], table.oid in partitioned, cursors.get(table.oid)) for table in tables]


def begin_table(connection: Connection, table: PolledTable, moment: Moment, keys: KnownKeys | None) -> TableState:
    """Where a table begins: whatever this moment does not see will be given out, and little else.

    Transactions that are open at the moment may write values of its column that are lower than some that are there; so until they have
    ended, a table that is asked by a column is asked by `xmin` too.
    """
    low = None if table.cursor is None else inspect_highest(connection, table)
    window = Window(low, moment.xmin)
    seen = read_versions(connection, table, window, moment, _MOST_SEEN)
    if keys is not None:
        keys.store(table.schema.oid, moment.position, read_keys_in_order(connection, table))
    return TableState(table.how, window, seen, moment.position if keys is not None else None)
