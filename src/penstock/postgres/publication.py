"""The publication: what the server puts into the stream.

It must exist before the slot does: pgoutput decides what is published by the catalog as of the change.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from psycopg import sql

from penstock.errors import SourceError
from penstock.postgres.connection import Connection, source_errors
from penstock.postgres.queries import query
from penstock.schema import TableName


def ensure_publication(connection: Connection, publication: str, tables: Collection[TableName]) -> list[TableName]:
    """Create the publication, or add what it lacks. Gives back the tables that were added. Never removes one."""
    parameters = {"publication": publication}
    found: Any = connection.execute(query("replication", "publication"), parameters).fetchone()
    if found is None:
        _run(connection, _create(publication, tables), f"creating publication {publication}")
        return sorted(tables)
    _check(publication, *found)
    rows: list[Any] = connection.execute(query("replication", "published_tables"), parameters).fetchall()
    missing = sorted(set(tables) - {TableName(schema, name) for schema, name in rows})
    if missing:
        statement = sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(publication), _list(missing))
        _run(connection, statement, f"adding tables to publication {publication}")
    return missing


def _check(publication: str, is_complete: bool, via_root: bool) -> None:
    """A publication made by somebody else must not leave changes out."""
    options = [] if is_complete else ["publish = 'insert, update, delete, truncate'"]
    options += [] if via_root else ["publish_via_partition_root = true"]
    if options:
        raise SourceError(
            f"publication {publication} leaves out changes that a mirror needs",
            hint=f"ALTER PUBLICATION {publication} SET ({', '.join(options)})",
        )


def _create(publication: str, tables: Collection[TableName]) -> sql.Composed:
    return sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = true)").format(
        sql.Identifier(publication), _list(sorted(tables))
    )


def _list(tables: Collection[TableName]) -> sql.Composed:
    return sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(table.schema, table.name)) for table in tables)


def _run(connection: Connection, statement: sql.Composed, doing: str) -> None:
    with source_errors(doing):
        connection.execute(statement)
