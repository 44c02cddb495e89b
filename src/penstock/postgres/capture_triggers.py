"""Triggers of a trigger capture, and the tables that have or need them.

`inspect_change_table` and `inspect_triggered` only read; an `Installation` creates what is missing.
Installing and removing never make other sessions queue behind a lock request. Tables are locked one at a
time, without waiting, and with retries for a limited time. `Installation.texts` are the SQL statements for a
person to run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from penstock.errors import ChangeTableMissingError, LockWaitError, PrivilegeError
from penstock.position import Position
from penstock.postgres.change_table import ChangeTable, own_schema, statement
from penstock.postgres.connection import Connection, source_errors
from penstock.postgres.membership import Membership
from penstock.postgres.ownership import LEASES, LOCK_SECONDS, FoundSchema, lease_statement, lock_timeout
from penstock.postgres.queries import identifier, query
from penstock.schema import TableName

_log = logging.getLogger(__name__)

_MADE = (psycopg.errors.DuplicateSchema, psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation)
_PAUSE_SECONDS = 0.1
_SHORT_WAIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ChangeTableFacts:
    """The schema of a trigger capture, and what this role may do with it."""

    is_ours: bool
    """Whether this role may act as the owner of the schema."""
    is_own: bool
    """Whether this role is the owner of the schema."""
    is_usable: bool
    """Whether this role may read and write the tables of the schema."""
    found: FoundSchema

    @property
    def owner(self) -> str:
        return self.found.owner

    @property
    def is_whole(self) -> bool:
        """Whether the schema is complete. The table of leases may be missing: the reader creates it in
        schemas of earlier versions.
        """
        return self.found.missing <= {LEASES.name}

    def refusal(self, schema: str) -> PrivilegeError | None:
        """Return the error if the change table must not be used; otherwise None."""
        if self.found.strange:
            return own_schema(schema).refusal(self.found)
        if not self.is_whole and (self.found.tables or self.found.functions):
            return PrivilegeError(
                f"schema {schema} has only some of the objects of a change table",
                hint=f"if nothing else uses the schema: DROP SCHEMA {identifier(schema)} CASCADE; the "
                "capture then creates it. Otherwise choose another schema name",
            )
        return None


@dataclass(frozen=True, slots=True)
class TriggeredRelation:
    """A requested table. `oid` and all fields after it are None or false if there is no such relation."""

    name: TableName
    oid: int | None
    kind: str | None
    persistence: str | None
    root: TableName | None
    """The root table of a partition; None for other tables."""
    has_triggers: bool
    """Whether triggers record the table's changes in every session."""
    apart: tuple[str, ...]
    """Unlogged and foreign partitions, whose changes may be missed."""
    owner: str | None
    is_ours: bool
    is_reachable: bool
    """Whether the role has USAGE on the schema."""


def trigger_names(schema: str) -> tuple[str, str]:
    """Return the names of the row trigger and of the truncate trigger. Triggers fire in name order, so with
    `!` these fire before triggers of the application.
    """
    return f"!{schema}", f"!{schema}_truncate"


def inspect_change_table(connection: Connection, schema: str) -> ChangeTableFacts | None:
    own = own_schema(schema)
    found = own.inspect(connection)
    arguments = {"schema": schema, "tables": [table.name for table in own.tables]}
    row: Any = connection.execute(query("change_table", "inspect"), arguments).fetchone()
    if found is None or row is None:
        return None
    is_ours, is_own, is_usable = row
    return ChangeTableFacts(is_ours, is_own, is_usable, found)


def has_change_table(connection: Connection, schema: str) -> bool:
    """Whether the complete change table exists. Raises an error if the schema has objects that must not be
    used.
    """
    facts = inspect_change_table(connection, schema)
    refusal = None if facts is None else facts.refusal(schema)
    if refusal is not None:
        raise refusal
    return facts is not None and facts.is_whole


def inspect_begin(connection: Connection, schema: str) -> Position:
    """Return the position after which the change table contains all changes; zero if there is no change
    table.
    """
    return (
        ChangeTable(connection, schema).inspect().confirmed
        if has_change_table(connection, schema)
        else Position.ZERO
    )


def inspect_triggered(
    connection: Connection, schema: str, tables: Iterable[TableName]
) -> list[TriggeredRelation]:
    """Inspect all `tables` with one statement, in name order."""
    rows: list[Any] = connection.execute(
        query("change_table", "relations"), _wanted(schema, tables)
    ).fetchall()
    return [_relation(row) for row in rows]


def inspect_trigger_memberships(
    connection: Connection, schema: str, tables: Iterable[TableName]
) -> dict[TableName, Membership]:
    """Return the membership of each of `tables` that has triggers of this change table."""
    rows: list[Any] = connection.execute(
        query("change_table", "memberships"), _wanted(schema, tables)
    ).fetchall()
    return {TableName(space, name): Membership(oid, act) for space, name, oid, act in rows}


def _wanted(schema: str, tables: Iterable[TableName]) -> dict[str, object]:
    wanted = sorted(set(tables))
    rows, truncates = trigger_names(schema)
    names = {"schemas": [table.schema for table in wanted], "names": [table.name for table in wanted]}
    return {"schema": schema, "rows": rows, "truncates": truncates, **names}


def _relation(row: Any) -> TriggeredRelation:
    schema, name, oid, kind, persistence, root_schema, root_name, noted, apart, owner, ours, usable = row
    root = None if root_schema is None else TableName(root_schema, root_name)
    return TriggeredRelation(
        TableName(schema, name),
        oid,
        kind,
        persistence,
        root,
        bool(noted),
        tuple(apart),
        owner,
        bool(ours),
        bool(usable),
    )


@dataclass(frozen=True, slots=True)
class Installation:
    """The plan to create the change table, if it is missing, and the triggers of `tables`."""

    schema: str
    role: str
    needs_table: bool
    tables: tuple[TableName, ...]
    needs_schema: bool = True
    """Whether the schema must be created before the change table; an existing schema must belong to the role
    that creates the table.
    """

    @property
    def texts(self) -> tuple[str, ...]:
        """The SQL for a person to run: one text for the change table if it is missing, and one for each
        table.
        """
        return tuple(f"{each.as_string()};" for each in (*self._making(), *self._attaching()))

    def run(self, connection: Connection) -> None:
        """Run each part in a separate transaction, so that only one table is locked at a time. Concurrent
        runs are safe.
        """
        with source_errors(f"setting up the change table {self.schema}"):
            retry = _LockRetry(f"setting up the change table {self.schema}")
            if self.needs_table:
                retry.run(connection, lambda: self._make(connection))
            for table in self.tables:
                retry.run(connection, partial(self._attach, connection, table))

    def _make(self, connection: Connection) -> None:
        if not has_change_table(connection, self.schema):
            # If two sessions create it at once, one waits for the other and fails.
            with suppress(*_MADE), connection.transaction():
                for each in self._making():
                    connection.execute(each)
            if not has_change_table(connection, self.schema):
                raise ChangeTableMissingError(
                    f"the change table {self.schema} is being removed by another session", hint="try again"
                )

    def _attach(self, connection: Connection, table: TableName) -> None:
        # This lock does not block readers. Replacing an existing trigger needs a stronger lock.
        _take(connection, table, "SHARE ROW EXCLUSIVE")
        row: Any = connection.execute(
            query("change_table", "has_triggers"), _wanted(self.schema, [table])
        ).fetchone()
        if row[0]:
            _take(connection, table, "ACCESS EXCLUSIVE")
        connection.execute(_of_table("attach", self.schema, table))

    def _making(self) -> list[sql.Composed]:
        if not self.needs_table:
            return []
        schema = [statement("create_schema", self.schema)] if self.needs_schema else []
        install, grant = (
            statement("install", self.schema),
            statement("grant", self.schema, role=sql.Identifier(self.role)),
        )
        return [sql.SQL(";\n").join([*schema, install, lease_statement("create", self.schema), grant])]

    def _attaching(self) -> list[sql.Composed]:
        return [_of_table("attach", self.schema, table) for table in self.tables]


def grant_text(schema: str, role: str) -> str:
    """Return the statement that lets a role read a change table, and remove confirmed changes."""
    return f"{statement('grant', schema, role=sql.Identifier(role)).as_string()};"


def attach_grant_text(schema: str, owner: str) -> str:
    """Return the statement that lets the role `owner` create triggers on its tables if the change table
    belongs to another role.
    """
    return f"{statement('grant_attaching', schema, role=sql.Identifier(owner)).as_string()};"


def detach(connection: Connection, schema: str, tables: Collection[TableName]) -> None:
    """Remove the triggers of tables that are no longer captured. A table keeps its triggers if this role may
    not remove them, or if the table stays locked; triggers that remain do no harm. Recorded changes stay
    until they are confirmed.
    """
    kept = _detach(connection, schema, sorted(tables), _LockRetry(f"removing triggers of {schema}"))
    if kept:
        _log.warning(
            "tables keep their triggers",
            extra={"schema": schema, "kept": {str(table): why for table, why in kept.items()}},
        )


def remove(connection: Connection, schema: str) -> None:
    """Remove the change table and all triggers, including changes that have not been read. Raises
    `LockWaitError` if a table stays locked; the call can then be repeated.
    """
    with source_errors(f"removing the change table {schema}"):
        retry = _LockRetry(f"removing the change table {schema}")
        rows: list[Any] = connection.execute(
            query("change_table", "tables_with_triggers"), {"schema": schema}
        ).fetchall()
        kept = _detach(connection, schema, [TableName(*row) for row in rows], retry)
        # Triggers on tables of other roles are dropped with the schema, which belongs to this role.
        busy = [table for table, why in kept.items() if why == LockWaitError.code]
        if busy:
            _log.warning(
                "tables keep their triggers", extra={"schema": schema, "kept": [str(table) for table in busy]}
            )
            raise LockWaitError(
                f"removing the change table {schema}: {', '.join(map(str, busy))} stay locked and keep "
                "their triggers"
            )
        retry.run(connection, partial(_drop, connection, schema))


def _detach(
    connection: Connection, schema: str, tables: Iterable[TableName], retry: _LockRetry
) -> dict[TableName, str]:
    """Remove triggers. Returns the tables whose triggers could not be removed, each with the error code."""
    kept = {}
    for table in tables:
        try:
            retry.run(connection, partial(_detach_one, connection, schema, table))
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            continue
        except psycopg.errors.InsufficientPrivilege:
            kept[table] = PrivilegeError.code
        except LockWaitError as error:
            kept[table] = error.code
    return kept


def _detach_one(connection: Connection, schema: str, table: TableName) -> None:
    _take(connection, table)
    connection.execute(_of_table("detach", schema, table))


def _drop(connection: Connection, schema: str) -> None:
    connection.execute(lock_timeout(_SHORT_WAIT_SECONDS))
    connection.execute(statement("remove", schema))


def _take(connection: Connection, table: TableName, mode: LiteralString = "ACCESS EXCLUSIVE") -> None:
    """Lock a table with all its partitions, or fail at once, since other sessions must not queue behind a
    waiting lock request.
    """
    connection.execute(lock_timeout(_SHORT_WAIT_SECONDS))
    name = sql.Identifier(table.schema, table.name)
    connection.execute(sql.SQL("LOCK TABLE {} IN {} MODE NOWAIT").format(name, sql.SQL(mode)))


class _LockRetry:
    """Runs each action in a transaction, and retries it while other sessions hold the required locks. One
    deadline applies to all actions together.
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._deadline = time.monotonic() + LOCK_SECONDS

    def run(self, connection: Connection, act: Callable[[], None]) -> None:
        while True:
            try:
                with connection.transaction():
                    connection.execute(lock_timeout(LOCK_SECONDS))
                    act()
            except psycopg.errors.LockNotAvailable as error:
                if time.monotonic() > self._deadline:
                    raise LockWaitError(
                        f"{self._doing}: other sessions have held the required locks for "
                        f"{LOCK_SECONDS:.0f} seconds"
                    ) from error
                time.sleep(_PAUSE_SECONDS)
            else:
                return


def _of_table(name: LiteralString, schema: str, table: TableName) -> sql.Composed:
    rows, truncates = map(sql.Identifier, trigger_names(schema))
    return statement(
        name, schema, table=sql.Identifier(table.schema, table.name), rows=rows, truncates=truncates
    )
