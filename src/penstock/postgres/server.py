"""The source server: system identity and timeline, WAL positions, limits, sessions that hold back WAL, and
the role's privileges.

A database system has a permanent identifier. Each promotion of a standby and each point-in-time recovery
begins a new timeline. The new timeline shares the WAL of the previous one up to the switch point; after that
point, the same WAL addresses contain different records. So a position has the same meaning on both timelines
only up to the switch point.

Creating a slot waits for all open transactions. A slot's restart point and catalog horizon do not advance
past an open transaction, so the server keeps WAL and dead rows even if the pipeline has confirmed everything
that committed.

Managed services give their administrators special roles instead of superuser. Suggested GRANT statements use
such a role where it exists.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from psycopg import sql

from penstock.errors import PenstockError, SenderLimitError, SlotLimitError
from penstock.lag import OpenTransaction
from penstock.position import Lsn, Position
from penstock.postgres.connection import Connection, SourceAddress, connect_replication, replication_command
from penstock.postgres.queries import identifier, query
from penstock.schema import TableName

_HISTORY = re.compile(r"^\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """System identifier and timeline. Positions are comparable as long as both are the same."""

    identifier: str
    timeline: int

    @classmethod
    def parse(cls, text: str) -> Self:
        identifier, _, timeline = text.partition("/")
        return cls(identifier, int(timeline))

    def __str__(self) -> str:
        return f"{self.identifier}/{self.timeline}"


def identify_system(address: SourceAddress) -> SystemIdentity:
    with connect_replication(address) as connection:
        identifier, timeline, *_ = replication_command(
            connection, "IDENTIFY_SYSTEM", "identifying the server"
        )
        return SystemIdentity(identifier, int(timeline))


def inspect_switch(address: SourceAddress, timeline: int, before: int) -> Lsn | None:
    """Return the LSN at which the history of `timeline`, the server's current timeline, left the timeline
    `before`. None if `before` is not part of that history.
    """
    if timeline <= before:
        return None
    with connect_replication(address) as connection:
        command = sql.SQL("TIMELINE_HISTORY {}").format(sql.Literal(timeline))
        _, content = replication_command(connection, command, f"reading the history of timeline {timeline}")
    return parse_history(content).get(before)


def parse_history(content: str) -> dict[int, Lsn]:
    """Parse a timeline history file; returns the end LSN of each earlier timeline."""
    return {int(timeline): Lsn.parse(switch) for timeline, switch in _HISTORY.findall(content)}


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceSample:
    """One health check of the server. The fields about the slot are None if it does not exist."""

    taken_at: datetime
    """The time of the check by the server's clock."""
    flushed: Position
    slot_restart: Lsn | None
    wal_status: str | None
    safe_wal_bytes: int | None
    catalog_xmin_age: int | None
    """The age of the slot's `catalog_xmin` in transactions. VACUUM cannot remove catalog rows that died after
    it.
    """
    oldest_xmin_age: int | None
    """The age of the oldest snapshot of any session, in transactions."""
    holders: tuple[OpenTransaction, ...]
    """Long-running transactions, the oldest first."""


def inspect_health(connection: Connection, slot: str, long_seconds: float) -> SourceSample:
    """Check the server's health with two short queries on system views. User tables are not read."""
    row: Any = connection.execute(query("replication", "health"), {"slot": slot}).fetchone()
    taken_at, flushed, restart, wal_status, safe_wal_bytes, catalog_age, oldest_age = row
    rows: Any = connection.execute(
        query("replication", "open_transactions"), {"long_seconds": long_seconds}
    ).fetchall()
    return SourceSample(
        taken_at,
        Position.parse(flushed),
        Lsn.parse(restart) if restart else None,
        wal_status,
        safe_wal_bytes,
        catalog_age,
        oldest_age,
        tuple(OpenTransaction(*each) for each in rows),
    )


def inspect_blockers(connection: Connection, pid: int) -> tuple[OpenTransaction, ...]:
    """Return the open transactions for which the server process `pid` waits."""
    rows: Any = connection.execute(query("replication", "blockers"), {"pid": pid}).fetchall()
    return tuple(OpenTransaction(*each) for each in rows)


def log_wait(blockers: Sequence[OpenTransaction]) -> None:
    _log.warning(
        "waiting for open transactions", extra={"transactions": [each.describe() for each in blockers]}
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the server, and their current usage. A field is None if this server version lacks the
    setting.
    """

    version: str
    version_number: int
    max_slots: int
    used_slots: int
    max_senders: int
    used_senders: int
    wal_keep_mb: int | None
    """How much WAL a slot may retain; -1 if unlimited."""
    sender_timeout_ms: int | None
    decoding_memory_kb: int | None
    idle_slot_timeout: int | None


def inspect_limits(connection: Connection) -> Limits:
    row: Any = connection.execute(query("privileges", "limits")).fetchone()
    return Limits(*row)


def limit_faults(limits: Limits, *, has_slot: bool) -> Iterator[PenstockError]:
    """Yield the errors for exhausted limits. A run needs one slot, and a second one while it copies tables.
    Each slot needs a WAL sender.
    """
    slots, senders = 2 - has_slot, 2
    if limits.max_slots - limits.used_slots < slots:
        yield SlotLimitError(
            f"{limits.used_slots} of {limits.max_slots} replication slots are taken, and {slots} more are "
            "needed",
            hint=f"ALTER SYSTEM SET max_replication_slots = {limits.used_slots + slots}; "
            "then restart the server",
        )
    if limits.max_senders - limits.used_senders < senders:
        yield SenderLimitError(
            f"{limits.used_senders} of {limits.max_senders} WAL senders are taken, and {senders} are needed",
            hint=f"ALTER SYSTEM SET max_wal_senders = {limits.used_senders + senders}; "
            "then restart the server",
        )


@dataclass(frozen=True, slots=True)
class Role:
    """The current user.

    `services` are the administrator roles of managed services, such as `rds_superuser`, that exist on this
    server.
    """

    name: str
    database: str
    may_create: bool
    """Whether the role may create publications and schemas in the database."""
    is_read_only: bool
    is_on_standby: bool
    services: tuple[str, ...]

    @property
    def identifier(self) -> str:
        return identifier(self.name)

    def replication_grant(self) -> str:
        """Return the SQL statement that lets the role open replication connections; on RDS, a GRANT of
        `rds_replication`.
        """
        if "rds_replication" in self.services:
            return f"GRANT rds_replication TO {self.identifier};"
        return f"ALTER ROLE {self.identifier} REPLICATION;"

    def creation_grant(self) -> str:
        return f"GRANT CREATE ON DATABASE {identifier(self.database)} TO {self.identifier};"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A heap (a table or a partition) that the role cannot read completely, with the reasons."""

    table: TableName
    has_usage: bool
    refused_columns: tuple[str, ...]
    row_security: bool


def inspect_role(connection: Connection) -> Role:
    row: Any = connection.execute(query("privileges", "role")).fetchone()
    name, database, may_create, is_read_only, is_on_standby, services = row
    return Role(name, database, may_create, is_read_only, is_on_standby, tuple(services))


def inspect_unreadable(connection: Connection, wanted: Mapping[int, Collection[str]]) -> list[Unreadable]:
    """Return the heaps that the role cannot read completely. `wanted` are the required columns of each table,
    by its OID; partitions are included. Executes one statement.
    """
    rows: list[Any] = connection.execute(query("privileges", "unreadable"), {"oids": list(wanted)}).fetchall()
    found = []
    for oid, schema, name, has_usage, columns, row_security in rows:
        # Grants on single columns do not include ctid, which a snapshot uses: it needs a grant on the table.
        refused = tuple(column for column in columns if column == "ctid" or column in wanted[oid])
        if refused or row_security or not has_usage:
            found.append(Unreadable(TableName(schema, name), has_usage, refused, row_security))
    return found


@dataclass(frozen=True, slots=True)
class OwnerCode:
    """Code of other roles that may run with this role's rights when it reads tables."""

    owners: Mapping[int, str]
    """By table OID, an owner of the table or of a partition who is not a superuser. The mapping is empty
    unless this role is a superuser.
    """
    functions: Mapping[int, tuple[str, ...]]
    """By table OID, the functions of other roles that indexes and constraints of the table call, each with
    the function's owner.
    """


def inspect_owner_code(connection: Connection, oids: Collection[int]) -> OwnerCode:
    """Inspect the tables with these OIDs, and their partitions."""
    owners: list[Any] = connection.execute(
        query("privileges", "foreign_owners"), {"oids": list(oids)}
    ).fetchall()
    functions: dict[int, tuple[str, ...]] = {}
    for oid, function, owner in connection.execute(
        query("privileges", "foreign_functions"), {"oids": list(oids)}
    ):
        functions[int(str(oid))] = (*functions.get(int(str(oid)), ()), f"{function} of {owner}")
    return OwnerCode(dict(owners), functions)
