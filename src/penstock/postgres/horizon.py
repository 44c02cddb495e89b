"""Telling rows written since a snapshot from those that it saw, by their `xmin`; and where the log stands right now."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import psycopg
from psycopg import sql

from penstock.errors import SnapshotLostError
from penstock.position import Position
from penstock.postgres.connection import Connection
from penstock.postgres.queries import query

_PAGE_BYTES = 8192
_HEADER_BYTES = (24, 40)


def inspect_horizon(connection: Connection, snapshot: str) -> int:
    """The oldest transaction that was open in the exported snapshot, as the 32 bits that rows carry. `SnapshotLostError` if it is gone."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
        except (psycopg.DataError, psycopg.ProgrammingError, psycopg.OperationalError) as error:
            raise SnapshotLostError("the exported snapshot is gone") from error
        row: Any = connection.execute(query("replication", "snapshot_xmin")).fetchone()
        return int(row[0])


def written_since(horizon: int) -> str:
    """A condition on rows: written by `horizon`, by a later transaction, or by one so old that its number has come round again."""
    return sql.SQL("pg_catalog.age(xmin) <= pg_catalog.age({}::pg_catalog.xid)").format(sql.Literal(str(horizon))).as_string()


def inspect_filenodes(connection: Connection, oids: Collection[int]) -> dict[int, int]:
    """Where the rows of these relations lie now, by OID; one that is gone is left out."""
    rows: list[Any] = connection.execute(query("catalog", "filenodes"), {"oids": list(oids)}).fetchall()
    return {oid: filenode for oid, filenode, _ in rows}


def insert_position(connection: Connection) -> Position:
    """Where the next record of the log will stand. It lies between two records, so everything is wholly before it or wholly after."""
    row: Any = connection.execute(query("replication", "insert_lsn")).fetchone()
    return Position.parse(row[0])


def shown_position(connection: Connection) -> Position:
    """All that this connection has seen of others lies before it, and a log in which nothing more happens gets there."""
    at = insert_position(connection).value
    # On a page that nothing stands on yet, the next record stands after a header, which is written with it.
    return Position.of(at - at % _PAGE_BYTES) if at % _PAGE_BYTES in _HEADER_BYTES else Position.of(at)
