"""The triggers of a capture, and the tables that have them or should.

`inspect_change_table` and `inspect_relations` only look; an `Installation` is what closes a gap, and never waits long for somebody else's
lock. Its texts are the statements that a person would paste.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from penstock.errors import LockWaitError, PrivilegeError
from penstock.position import Position
from penstock.postgres.change_table import ChangeTable, statement
from penstock.postgres.connection import Connection, source_errors
from penstock.postgres.publication import LOCK_SECONDS
from penstock.postgres.queries import identifier, query
from penstock.schema import TableName

_TABLES = ("changes", "commits", "horizon", "resume", "shapes")


@dataclass(frozen=True, slots=True)
class ChangeTableFacts:
    """The schema of a capture, as one role sees it."""

    is_ours: bool
    """Whether this role may add to it."""
    owner: str
    is_own: bool
    """Whether this role itself is the owner."""
    is_whole: bool
    is_usable: bool
    """Whether this role may read and write what is in it."""
    is_begun: bool
    """Whether there is anything by the names that a change table needs."""
    strange: tuple[str, ...]
    """What is not its owner's, or would have code of others run when the change table is used."""

    def refusal(self, schema: str) -> PrivilegeError | None:
        """Why nothing of it may be used, if that is so."""
        anew = f"DROP SCHEMA {identifier(schema)} CASCADE; then start the capture, which makes its own; or choose another name for it"
        if self.strange:
            what = f"schema {schema} has what somebody else has put there: {', '.join(self.strange)}"
            return PrivilegeError(f"{what}; used, it could run with the rights of whoever uses it", hint=f"see who did; {anew}")
        if self.is_begun and not self.is_whole:
            return PrivilegeError(f"schema {schema} has a part of a change table, or something else by such names", hint=anew)
        return None


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
    if row is None:
        return None
    is_ours, owner, is_own, is_whole, is_usable, is_begun, strange = row
    return ChangeTableFacts(is_ours, owner, is_own, is_whole, is_usable, is_begun, tuple(strange))


def has_change_table(connection: Connection, schema: str) -> bool:
    """Whether there is one. Raises if there is something else in its place, or in it, that must not be used."""
    facts = inspect_change_table(connection, schema)
    refusal = None if facts is None else facts.refusal(schema)
    if refusal is not None:
        raise refusal
    return facts is not None and facts.is_whole


def inspect_begin(connection: Connection, schema: str) -> Position:
    """After which position a change table still has everything; zero if there is none."""
    return ChangeTable(connection, schema).inspect().confirmed if has_change_table(connection, schema) else Position.ZERO


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
    needs_schema: bool = True
    """If the table is needed; a schema that is there must be that of whoever makes the table."""

    @property
    def texts(self) -> tuple[str, ...]:
        """To be pasted: one for the change table, if need be, and one for each table."""
        return tuple(f"{each.as_string()};" for each in (*self._making(), *self._attaching()))

    def run(self, connection: Connection) -> None:
        """Each part in a transaction of its own, so that only one table is locked at a time. Two who do it at once do no harm."""
        with source_errors(f"setting up the change table {self.schema}"):
            for each in self._making():
                self._run(connection, each, is_done=has_change_table)
            for each in self._attaching():
                self._run(connection, each)

    def _run(
        self, connection: Connection, part: sql.Composed, is_done: Callable[[Connection, str], bool] = lambda _connection, _schema: False
    ) -> None:
        try:
            with connection.transaction():
                connection.execute(_patience())
                # Two who set up the same thing at once take turns.
                connection.execute(query("change_table", "lock_setup"), {"schema": self.schema})
                if not is_done(connection, self.schema):
                    connection.execute(part)
        except psycopg.errors.LockNotAvailable as error:
            raise LockWaitError(
                f"setting up the change table {self.schema}: another session has held a lock for more than {LOCK_SECONDS:.0f} seconds"
            ) from error

    def _making(self) -> list[sql.Composed]:
        if not self.needs_table:
            return []
        schema = [statement("create_schema", self.schema)] if self.needs_schema else []
        install, grant = statement("install", self.schema), statement("grant", self.schema, role=sql.Identifier(self.role))
        return [sql.SQL(";\n").join([*schema, install, grant])]

    def _attaching(self) -> list[sql.Composed]:
        return [_of_table("attach", self.schema, table) for table in self.tables]


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
