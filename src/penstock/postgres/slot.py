"""The replication slot: the server's promise to keep what we have not confirmed.

`inspect_slot` reads it, `check_slot` refuses one that cannot be trusted, `ensure_slot` creates it. A slot is created after the
publication and before any snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import sql

from penstock.errors import SlotBusyError, SlotForeignError, SlotLostError, SourceError, WalLevelError
from penstock.position import Lsn, Position
from penstock.postgres.connection import Connection, SourceAddress, connect_replication, replication_command
from penstock.postgres.queries import query

PLUGIN = "pgoutput"


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of pg_replication_slots."""

    name: str
    plugin: str | None
    kind: str
    database: str | None
    active_pid: int | None
    restart: Lsn | None
    confirmed: Position
    wal_status: str | None
    safe_wal_bytes: int | None
    temporary: bool


@dataclass(frozen=True, slots=True)
class Server:
    """What must be known about the server before anything is asked of it."""

    wal_level: str
    version: int
    database: str
    in_recovery: bool


def inspect_server(connection: Connection) -> Server:
    row: Any = connection.execute(query("replication", "server")).fetchone()
    return Server(*row)


def check_server(server: Server) -> None:
    if server.in_recovery:
        raise SourceError("the server is a standby, on which a publication cannot be created", hint="point source.dsn at the primary")
    if server.wal_level != "logical":
        raise WalLevelError(
            f"the server's wal_level is {server.wal_level}, and logical replication needs logical",
            hint="ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
        )


def current_position(connection: Connection) -> Position:
    """Up to where the server has flushed its WAL; everything committed so far lies at or below it."""
    row: Any = connection.execute(query("replication", "current_lsn")).fetchone()
    return Position.parse(row[0])


def inspect_slot(connection: Connection, name: str) -> Slot | None:
    row: Any = connection.execute(query("replication", "slot"), {"slot": name}).fetchone()
    if row is None:
        return None
    slot, plugin, kind, database, pid, restart, confirmed, status, safe, temporary = row
    return Slot(
        slot,
        plugin,
        kind,
        database,
        pid,
        Lsn.parse(restart) if restart else None,
        Position.parse(confirmed) if confirmed else Position.ZERO,
        status,
        safe,
        temporary,
    )


def check_slot(slot: Slot, database: str) -> None:
    """Raise the error that names why this slot cannot be read from, if there is a reason. Being busy is looked at last."""
    if slot.kind != "logical" or slot.plugin != PLUGIN or slot.database != database:
        raise SlotForeignError(
            f"slot {slot.name} is a {slot.kind} slot of plugin {slot.plugin} in database {slot.database}, "
            f"not a logical {PLUGIN} slot in {database}",
            hint="choose another name under source.slot",
        )
    if slot.wal_status == "lost" or slot.restart is None:
        raise SlotLostError(
            f"slot {slot.name} was invalidated by the server (wal_status {slot.wal_status}): WAL that was still needed is gone",
            hint=f"SELECT pg_drop_replication_slot('{slot.name}'); then remove the target tables, their penstock_epochs "
            "and the state directory, and run again to copy them anew",
        )


def check_idle(slot: Slot) -> None:
    if slot.active_pid is not None:
        raise SlotBusyError(f"slot {slot.name} is being read by the server process {slot.active_pid}")


def ensure_slot(address: SourceAddress, connection: Connection, name: str) -> Slot:
    """Create the slot if it is not there. Creating waits for the transactions that are open at that moment."""
    slot = inspect_slot(connection, name)
    if slot is None:
        command = sql.SQL("CREATE_REPLICATION_SLOT {} LOGICAL {} NOEXPORT_SNAPSHOT").format(sql.Identifier(name), sql.SQL(PLUGIN))
        with connect_replication(address) as replication:
            replication_command(replication, command, f"creating slot {name}")
        slot = inspect_slot(connection, name)
        if slot is None:  # dropped again at once by somebody else
            raise SlotForeignError(f"slot {name} vanished right after it was created", hint="look for another process that drops it")
    return slot
