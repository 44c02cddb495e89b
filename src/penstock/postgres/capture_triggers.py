"""The triggers of a capture, and the tables that have them or should.

`inspect_change_table` and `inspect_relations` only look; an `Installation` is what closes a gap, and never waits long for somebody else's
lock. Its texts are the statements that a person would paste.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from penstock.errors import LockWaitError
from penstock.position import Position
from penstock.postgres.change_table import ChangeTable, statement
from penstock.postgres.connection import Connection, source_errors
from penstock.postgres.publication import LOCK_SECONDS
from penstock.postgres.queries import query
from penstock.schema import TableName

_TABLES = ("changes", "commits", "horizon", "resume", "shapes")


@dataclass(frozen=True, slots=True)
class ChangeTableFacts:
    """The schema of a capture, as one role sees it."""

    is_ours: bool
    """Whether this role may add to it."""
    owner: str
    is_whole: bool
    is_usable: bool
    """Whether this role may read and write what is in it."""


@dataclass(frozen=True, slots=True)
class TriggeredRelation:
    """A table that somebody asks for. `oid` and all after it are None or false if there is no such relation."""

    name: TableName
    oid: int | None
    kind: str | None
    persistence: str | None
    root: TableName | None
    """Of a partition: the table that it is a part of."""
    is_noted: bool
    """Whether its changes are written down, by triggers that fire for everybody."""
    apart: tuple[str, ...]
    """Partitions whose rows may go without a change: unlogged or foreign ones."""
    owner: str | None
    is_ours: bool
    is_reachable: bool
    """Whether the role may use the schema."""


def trigger_names(schema: str) -> tuple[str, str]:
    """Of the trigger for rows and of that for truncates. Triggers fire in the order of their names."""
    return f"!{schema}", f"!{schema}_truncate"


def inspect_change_table(connection: Connection, schema: str) -> ChangeTableFacts | None:
    row: Any = connection.execute(query("change_table", "inspect"), {"schema": schema, "tables": list(_TABLES)}).fetchone()
    return None if row is None else ChangeTableFacts(row[0], row[1], row[2], row[3])


def inspect_begin(connection: Connection, schema: str) -> Position:
    """After which position a change table still has everything; zero if there is none."""
    facts = inspect_change_table(connection, schema)
    return Position.ZERO if facts is None or not facts.is_whole else ChangeTable(connection, schema).inspect().confirmed


def inspect_triggered(connection: Connection, schema: str, tables: Iterable[TableName]) -> list[TriggeredRelation]:
    """All `tables` in name order, in one statement however many there are."""
    rows: list[Any] = connection.execute(query("change_table", "relations"), _wanted(schema, tables)).fetchall()
    return [_relation(row) for row in rows]


def inspect_acts(connection: Connection, schema: str, tables: Iterable[TableName]) -> dict[TableName, str]:
    """For each table that has its triggers: a text that stays the same for as long as it has had them without a break."""
    rows: list[Any] = connection.execute(query("change_table", "acts"), _wanted(schema, tables)).fetchall()
    return {TableName(space, name): act for space, name, act in rows}


def _wanted(schema: str, tables: Iterable[TableName]) -> dict[str, object]:
    wanted = sorted(set(tables))
    rows, truncates = trigger_names(schema)
    names = {"schemas": [table.schema for table in wanted], "names": [table.name for table in wanted]}
    return {"schema": schema, "rows": rows, "truncates": truncates, **names}


def _relation(row: Any) -> TriggeredRelation:
    schema, name, oid, kind, persistence, root_schema, root_name, noted, apart, owner, ours, usable = row
    root = None if root_schema is None else TableName(root_schema, root_name)
    return TriggeredRelation(
        TableName(schema, name), oid, kind, persistence, root, bool(noted), tuple(apart), owner, bool(ours), bool(usable)
    )


@dataclass(frozen=True, slots=True)
class Installation:
    """What makes some tables' changes be written down: the change table, if it is not there, and their triggers."""

    schema: str
    role: str
    needs_table: bool
    tables: tuple[TableName, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """To be pasted: one for the change table, if need be, and one for each table."""
        return tuple(f"{each.as_string()};" for each in self._statements())

    def run(self, connection: Connection) -> None:
        """Each part in a transaction of its own, so that only one table is locked at a time. Doing it again does no harm."""
        with source_errors(f"setting up the change table {self.schema}"):
            for each in self._statements():
                self._run(connection, each)

    def _run(self, connection: Connection, part: sql.Composed) -> None:
        try:
            with connection.transaction():
                connection.execute(_patience())
                # Two who set up the same thing at once take turns.
                connection.execute(query("change_table", "lock_setup"), {"schema": self.schema})
                connection.execute(part)
        except psycopg.errors.LockNotAvailable as error:
            raise LockWaitError(
                f"setting up the change table {self.schema}: another session has held a lock for more than {LOCK_SECONDS:.0f} seconds"
            ) from error

    def _statements(self) -> list[sql.Composed]:
        parts = []
        if self.needs_table:
            install, grant = statement("install", self.schema), statement("grant", self.schema, role=sql.Identifier(self.role))
            parts.append(sql.SQL(";\n").join([install, grant]))
        return parts + [_of_table("attach", self.schema, table) for table in self.tables]


def grant_text(schema: str, role: str) -> str:
    """What lets a role read a change table, and remove what is confirmed."""
    return f"{statement('grant', schema, role=sql.Identifier(role)).as_string()};"


def attach_grant_text(schema: str, owner: str) -> str:
    """What lets the owner of tables give them triggers that write to somebody else's change table."""
    return f"{statement('grant_attaching', schema, role=sql.Identifier(owner)).as_string()};"


def detach(connection: Connection, schema: str, tables: Collection[TableName]) -> None:
    """Take the triggers away from tables that are not captured any more, as far as this role may; one that keeps them does no harm.

    What they have written stays until it is confirmed.
    """
    for table in sorted(tables):
        with suppress(psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable), connection.transaction():
            connection.execute(_patience())
            connection.execute(_of_table("detach", schema, table))


def remove(connection: Connection, schema: str) -> None:
    """Take away everything, also what nobody has read."""
    with source_errors(f"removing the change table {schema}"), connection.transaction():
        connection.execute(_patience())
        connection.execute(statement("remove", schema))


def _patience() -> sql.Composed:
    """An application must not queue up behind us for long."""
    return sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{LOCK_SECONDS:.0f}s"))


def _of_table(name: LiteralString, schema: str, table: TableName) -> sql.Composed:
    rows, truncates = map(sql.Identifier, trigger_names(schema))
    return statement(name, schema, table=sql.Identifier(table.schema, table.name), rows=rows, truncates=truncates)
