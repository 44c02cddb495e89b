"""Which history of the log the server is on.

A database system has an identifier for life. Each promotion of a standby, and each restore to a point in time, begins a new timeline: up to
the switch it shares its log with the one before, after it the same addresses hold other things. A position means the same on both only up
to the switch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from psycopg import sql

from penstock.position import Lsn
from penstock.postgres.connection import SourceAddress, connect_replication, replication_command

_HISTORY = re.compile(r"^\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """System identifier and timeline: the same for as long as positions in the log mean the same."""

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
        identifier, timeline, *_ = replication_command(connection, "IDENTIFY_SYSTEM", "identifying the server")
        return SystemIdentity(identifier, int(timeline))


def inspect_switch(address: SourceAddress, timeline: int, before: int) -> Lsn | None:
    """Where the way to `timeline`, the server's own, left the timeline `before`; None if it never was on that one."""
    if timeline <= before:
        return None
    with connect_replication(address) as connection:
        command = sql.SQL("TIMELINE_HISTORY {}").format(sql.Literal(timeline))
        _, content = replication_command(connection, command, f"asking for the history of timeline {timeline}")
    return parse_history(content).get(before)


def parse_history(content: str) -> dict[int, Lsn]:
    """Where each timeline in a history file was left."""
    return {int(timeline): Lsn.parse(switch) for timeline, switch in _HISTORY.findall(content)}
