"""The replication slot, which makes the server keep WAL until the pipeline has confirmed it. `inspect_slot`
reads the slot's state, `check_slot` rejects a slot that cannot be used, and `ensure_slot` creates one. A slot
must be created after the publication and before any snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import sql

from penstock.errors import (
    ConfigError,
    PenstockError,
    SlotBusyError,
    SlotDatabaseError,
    SlotFailoverError,
    SlotForeignError,
    SlotLostError,
    SlotPhysicalError,
    SlotPluginError,
    SlotTemporaryError,
    SlotTwoPhaseError,
    StandbyError,
    WalLevelError,
)
from penstock.lag import OpenTransaction
from penstock.position import Lsn, Position
from penstock.postgres.connection import (
    Connection,
    SourceAddress,
    connect_replication,
    replication_command,
    source_errors,
)
from penstock.postgres.queries import query
from penstock.postgres.server import inspect_blockers, log_wait

PLUGIN = "pgoutput"
FAILOVER_VERSION = 17
"""The first version that copies slots to standbys."""

COPY_AGAIN = (
    "copy the tables again: for a pipeline, remove the target tables, their penstock_epochs and the state "
    "directory, and run again; "
    "for a WalCapture, drop the slot if it exists, remove the spool, and take a new snapshot"
)
_OTHER_NAME = "choose another name under source.slot (the option slot of the Spark source)"
_NAME = re.compile(r"[a-z0-9_]{1,63}")

_REASONS = {
    "wal_removed": "WAL that was still needed has been removed, since the slot held back more than "
    "max_slot_wal_keep_size",
    "rows_removed": "catalog rows that were still needed have been vacuumed away on the primary",
    "wal_level_insufficient": "the primary's wal_level was not logical for a while",
    "idle_timeout": "it was not read for longer than idle_replication_slot_timeout",
    "conflicting": "WAL or catalog rows that were still needed have been removed; this version of Postgres "
    "does not report which",
}

OnWait = Callable[[Sequence[OpenTransaction]], None]


@dataclass(frozen=True, slots=True)
class SlotReader:
    """The session that reads the slot. The server hides some of these fields from roles that are not members
    of pg_monitor.
    """

    pid: int
    application: str | None
    client: str | None
    since: datetime | None

    def describe(self) -> str:
        parts = [
            f"application {self.application!r}" if self.application else "",
            f"client {self.client}" if self.client else "",
        ]
        parts.append(f"since {self.since:%Y-%m-%d %H:%M:%S %Z}" if self.since else "")
        known = ", ".join(part for part in parts if part)
        return f"{self.pid} ({known})" if known else str(self.pid)


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of pg_replication_slots."""

    name: str
    plugin: str | None
    kind: str
    database: str | None
    restart: Lsn | None
    confirmed: Position
    wal_status: str | None
    safe_wal_bytes: int | None
    temporary: bool = False
    two_phase: bool = False
    failover: bool = False
    synced: bool = False
    """Whether it was synchronised from the primary while this server was a standby."""
    invalidation: str | None = None
    """The reason why the server has invalidated the slot; None if it is valid."""
    reader: SlotReader | None = None

    @property
    def active_pid(self) -> int | None:
        return self.reader.pid if self.reader is not None else None


@dataclass(frozen=True, slots=True)
class Server:
    """Properties of the server that decide whether it can be captured."""

    wal_level: str
    version: int
    database: str
    in_recovery: bool


def inspect_server(connection: Connection) -> Server:
    row: Any = connection.execute(query("replication", "server")).fetchone()
    return Server(*row)


def server_faults(server: Server) -> Iterator[PenstockError]:
    """Yield the errors for all reasons why this server cannot be captured. A run raises the first one."""
    if server.in_recovery:
        yield StandbyError(
            "the server is a standby, on which publications and slots are not reliable",
            hint="point source.dsn at the primary; in a dsn with several hosts, "
            "target_session_attrs=read-write selects it",
        )
    if server.wal_level != "logical":
        yield WalLevelError(
            f"the server's wal_level is {server.wal_level}, and logical replication needs logical",
            hint="ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
        )


def check_server(server: Server) -> None:
    for fault in server_faults(server):
        raise fault


def current_position(connection: Connection) -> Position:
    """The position up to which the server has flushed its WAL.

    All commits that are on disk are at or below it.
    """
    row: Any = connection.execute(query("replication", "current_lsn")).fetchone()
    return Position.parse(row[0])


def nudge(connection: Connection) -> None:
    """Write a WAL record, so that the position of an idle database moves past all earlier changes."""
    connection.execute(query("replication", "nudge"))


def is_slot_name(name: str) -> bool:
    """Whether the name is a valid slot name, checked without a query."""
    return _NAME.fullmatch(name) is not None


def check_slot_name(name: str) -> None:
    if not is_slot_name(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a replication slot",
            hint="use lower-case letters, digits and underscores, 63 at most",
        )


def inspect_slot(connection: Connection, name: str) -> Slot | None:
    row: Any = connection.execute(query("replication", "slot"), {"slot": name}).fetchone()
    if row is None:
        return None
    restart, confirmed, reason, is_conflicting, pid, application, client, since, *plain = row
    name, plugin, kind, database, wal_status, safe_wal_bytes, temporary, two_phase, failover, synced = plain
    if reason is None:
        reason = "conflicting" if is_conflicting else "wal_removed" if wal_status == "lost" else None
    return Slot(
        name,
        plugin,
        kind,
        database,
        Lsn.parse(restart) if restart else None,
        Position.parse(confirmed) if confirmed else Position.ZERO,
        wal_status,
        safe_wal_bytes,
        temporary,
        two_phase,
        failover,
        synced,
        reason,
        SlotReader(pid, application, client, since) if pid is not None else None,
    )


def check_slot(slot: Slot, database: str) -> None:
    """Raise an error with the reason if this slot cannot be used. `check_idle` checks whether another session
    reads it.
    """
    foreign = _foreign(slot, database)
    if foreign is not None:
        raise foreign
    if slot.invalidation is not None or slot.restart is None:
        reason = slot.invalidation or "unknown"
        raise SlotLostError(
            f"the server has invalidated slot {slot.name} ({reason}): "
            f"{_REASONS.get(reason, 'it does not report why')}; "
            f"transactions that committed after {slot.confirmed} can no longer be read",
            hint=f"{drop_statement(slot.name)} then {COPY_AGAIN}",
        )


def _foreign(slot: Slot, database: str) -> PenstockError | None:
    name, drop = slot.name, f"or, if it is not needed, SELECT pg_drop_replication_slot('{slot.name}')"
    if slot.kind != "logical":
        return SlotPhysicalError(
            f"slot {name} is a {slot.kind} slot, not a logical one", hint=f"{_OTHER_NAME}, {drop}"
        )
    if slot.temporary:
        owner = slot.reader.describe() if slot.reader is not None else "unknown"
        end = (
            f", or end that session: SELECT pg_terminate_backend({slot.active_pid})"
            if slot.active_pid is not None
            else ""
        )
        return SlotTemporaryError(
            f"slot {name} is a temporary slot of server process {owner} and ends with it",
            hint=f"{_OTHER_NAME}{end}",
        )
    if slot.plugin != PLUGIN:
        return SlotPluginError(
            f"slot {name} is a slot of plugin {slot.plugin}, not of {PLUGIN}", hint=f"{_OTHER_NAME}, {drop}"
        )
    if slot.database != database:
        return SlotDatabaseError(
            f"slot {name} is a slot of database {slot.database}, not of {database}",
            hint=f"{_OTHER_NAME}, or point source.dsn at database {slot.database}",
        )
    if slot.two_phase:
        return SlotTwoPhaseError(
            f"slot {name} was created with two_phase: it sends prepared transactions that may still be "
            "rolled back",
            hint=f"{_OTHER_NAME}, {drop}",
        )
    return None


def check_idle(slot: Slot) -> None:
    """Raise `SlotBusyError` if the slot has a reader, or has not been created completely. Call it after all
    other checks: only these problems may resolve themselves.
    """
    if slot.reader is not None:
        raise SlotBusyError(
            f"slot {slot.name} is being read by server process {slot.reader.describe()}",
            hint="stop that reader; if it has ended and the server has not noticed yet: "
            f"SELECT pg_terminate_backend({slot.reader.pid})",
        )
    if slot.confirmed == Position.ZERO:
        raise SlotBusyError(
            f"slot {slot.name} has not been created completely",
            hint=f"if that lasts: SELECT pg_drop_replication_slot('{slot.name}')",
        )


def check_failover(failover: bool, version: int) -> None:
    major = version // 10_000
    if failover and major < FAILOVER_VERSION:
        raise SlotFailoverError(
            f"source.failover is set, and the server is Postgres {major}: slots are copied to standbys "
            f"since Postgres {FAILOVER_VERSION}",
            hint="remove source.failover from the configuration, or upgrade the server",
        )


def inspect_other_slots(connection: Connection, name: str) -> list[str]:
    """Return the names of other logical slots of this database that use pgoutput."""
    return [str(row[0]) for row in connection.execute(query("replication", "other_slots"), {"slot": name})]


def drop_statement(name: str) -> str:
    """Return the SQL statement that drops the slot, for error messages."""
    return f"SELECT pg_drop_replication_slot('{name}');"


def drop_slot(connection: Connection, name: str) -> None:
    with source_errors(f"dropping slot {name}"):
        connection.execute(query("replication", "drop_slot"), {"slot": name})


def ensure_slot(
    address: SourceAddress,
    connection: Connection,
    name: str,
    failover: bool = False,
    on_wait: OnWait = log_wait,
) -> Slot:
    """Create the slot if it is missing. With `failover`, mark it to be copied to standbys. Creating it waits
    for the transactions that are open at that moment; `on_wait` is called once a second with them.
    """
    check_failover(failover, connection.info.server_version)
    slot = inspect_slot(connection, name)
    if slot is None:
        _create_slot(address, connection, name, failover, on_wait)
    elif failover and not slot.failover and slot.kind == "logical" and slot.invalidation is None:
        check_idle(slot)
        command = sql.SQL("ALTER_REPLICATION_SLOT {} (FAILOVER true)").format(sql.Identifier(name))
        with connect_replication(address) as replication:
            replication_command(replication, command, f"marking slot {name} for failover")
    else:
        return slot
    slot = inspect_slot(connection, name)
    if slot is None:  # another session dropped it at once
        raise SlotForeignError(
            f"slot {name} vanished right after it was created", hint="look for another process that drops it"
        )
    return slot


def _create_slot(
    address: SourceAddress, connection: Connection, name: str, failover: bool, on_wait: OnWait
) -> None:
    options = sql.SQL("(SNAPSHOT 'nothing', FAILOVER true)" if failover else "NOEXPORT_SNAPSHOT")
    command = sql.SQL("CREATE_REPLICATION_SLOT {} LOGICAL {} {}").format(
        sql.Identifier(name), sql.SQL(PLUGIN), options
    )
    with connect_replication(address) as replication:
        pid = replication.info.backend_pid
        replication_command(
            replication,
            command,
            f"creating slot {name}",
            on_wait=lambda: on_wait(inspect_blockers(connection, pid)),
        )
