"""A snapshot, and the position at which it is exact if it needs one.

The pair comes from creating a temporary logical slot: every transaction that commits up to its consistent point is visible in the exported
snapshot, every later one is not. The snapshot lives as long as the connection that made the slot stays idle.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from psycopg import sql

from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import Connection, SourceAddress, connect, connect_replication, replication_command
from penstock.postgres.health import inspect_blockers, log_wait
from penstock.postgres.queries import query
from penstock.postgres.slot import PLUGIN, OnWait


def reader_name(snapshot: str | None) -> str:
    """The name under which sessions read rows of an exported snapshot, so that whoever holds it can tell his readers from others'."""
    return "penstock snapshot" if snapshot is None else f"penstock snapshot {snapshot}"


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """`name` is for SET TRANSACTION SNAPSHOT; `fence` is the position at which reading under it is exact."""

    name: str
    fence: Position


@contextmanager
def export_snapshot(address: SourceAddress, on_wait: OnWait = log_wait, _tables: Sequence[CatalogTable] = ()) -> Iterator[ExportedSnapshot]:
    """Hold a snapshot open for the length of the block. Creating it waits for the transactions that are open at that moment.

    `on_wait` is told once a second for which; what it raises ends the wait.
    """
    slot = f"penstock_snapshot_{os.getpid()}_{secrets.token_hex(4)}"
    command = sql.SQL("CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL {} EXPORT_SNAPSHOT").format(sql.Identifier(slot), sql.SQL(PLUGIN))
    with connect_replication(address, "penstock snapshot") as connection:
        pid = connection.info.backend_pid

        def tell() -> None:
            with connect(address) as looking:
                on_wait(inspect_blockers(looking, pid))

        _, consistent, name, _ = replication_command(connection, command, "exporting a snapshot", on_wait=tell)
        yield ExportedSnapshot(name, Position.parse(consistent))


class Export(Protocol):
    """A way of holding a snapshot that has a fence; `tables` are those that are copied under it."""

    def __call__(
        self, address: SourceAddress, on_wait: OnWait, tables: Sequence[CatalogTable] = (), /
    ) -> AbstractContextManager[ExportedSnapshot]: ...


@dataclass(frozen=True, slots=True)
class SharedSnapshot:
    """An exported snapshot without a position, and the connection that holds it."""

    name: str
    connection: Connection

    def count_readers(self) -> int:
        """How many sessions of this role read under this snapshot just now."""
        self.connection.execute("SELECT pg_catalog.pg_stat_clear_snapshot()")
        row: Any = self.connection.execute(query("replication", "chunk_readers"), {"application": reader_name(self.name)}).fetchone()
        return int(row[0])


@contextmanager
def share_snapshot(address: SourceAddress) -> Iterator[SharedSnapshot]:
    """Hold a snapshot for reading alone: the role needs no right to replicate, and nothing is waited for."""
    with connect(address, "penstock holder") as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row: Any = connection.execute("SELECT pg_catalog.pg_export_snapshot()").fetchone()
        yield SharedSnapshot(row[0], connection)
