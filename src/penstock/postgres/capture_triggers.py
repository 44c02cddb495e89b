"""The triggers of a capture, and the tables that have them or should.

`inspect_change_table` and `inspect_relations` only look; an `Installation` is what closes a gap. Nobody ever queues up behind it, nor
behind who takes triggers away: a table is had at once or not at all, one at a time, and tried again for a while. Its texts are the
statements that a person would paste.
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
from penstock.postgres.lease import LEASES, LOCK_SECONDS, lease_statement
from penstock.postgres.ownership import FoundSchema
from penstock.postgres.queries import identifier, query
from penstock.schema import TableName

_log = logging.getLogger(__name__)

_MADE = (psycopg.errors.DuplicateSchema, psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation)
_PAUSE_SECONDS = 0.1
_GLIMPSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ChangeTableFacts:
    """The schema of a capture, as one role sees it."""

    is_ours: bool
    """Whether this role may add to it."""
    is_own: bool
    """Whether this role itself is the owner."""
    is_usable: bool
    """Whether this role may read and write the tables."""
    found: FoundSchema

    @property
    def owner(self) -> str:
        return self.found.owner

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing but the table of leases, which the reader creates where an earlier version did not."""
        return self.found.missing <= {LEASES.name}

    def refusal(self, schema: str) -> PrivilegeError | None:
        """The reason why the change table must not be used, if there is one."""
        if self.found.strange:
            return own_schema(schema).refusal(self.found)
        if not self.is_whole and (self.found.tables or self.found.functions):
            return PrivilegeError(
                f"schema {schema} has a part of a change table, or other objects of the same names",
                hint=f"DROP SCHEMA {identifier(schema)} CASCADE; then start the capture, which creates it; or choose another name for it",
            )
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
    own = own_schema(schema)
    found = own.inspect(connection)
    arguments = {"schema": schema, "tables": [table.name for table in own.tables]}
    row: Any = connection.execute(query("change_table", "inspect"), arguments).fetchone()
    if found is None or row is None:
        return None
    is_ours, is_own, is_usable = row
    return ChangeTableFacts(is_ours, is_own, is_usable, found)


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
    """For each table that has its triggers: a text that stays the same, by `is_same_act`, for as long as it has them without a break."""
    rows: list[Any] = connection.execute(query("change_table", "acts"), _wanted(schema, tables)).fetchall()
    return {TableName(space, name): act for space, name, act in rows}


def is_same_act(before: str, now: str) -> bool:
    """Whether a table has had its triggers without a break, in all partitions that it had before and has now. Others come and go."""
    (own, _, parts), (own_now, _, parts_now) = before.partition("|"), now.partition("|")
    known = dict(part.split("/") for part in parts.split(",") if part)
    return own == own_now and all(known.get(oid, act) == act for oid, act in (part.split("/") for part in parts_now.split(",") if part))


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
            patience = _Patience(f"setting up the change table {self.schema}")
            if self.needs_table:
                patience.insist(connection, lambda: self._make(connection))
            for table in self.tables:
                patience.insist(connection, partial(self._attach, connection, table))

    def _make(self, connection: Connection) -> None:
        if not has_change_table(connection, self.schema):
            # Of two sessions that create it at once, one waits for the other and fails.
            with suppress(*_MADE), connection.transaction():
                for each in self._making():
                    connection.execute(each)
            if not has_change_table(connection, self.schema):
                raise ChangeTableMissingError(f"the change table {self.schema} is being removed by another session", hint="try again")

    def _attach(self, connection: Connection, table: TableName) -> None:
        # Readers need not wait, unless there is a trigger to be replaced.
        _take(connection, table, "SHARE ROW EXCLUSIVE")
        row: Any = connection.execute(query("change_table", "has_triggers"), _wanted(self.schema, [table])).fetchone()
        if row[0]:
            _take(connection, table, "ACCESS EXCLUSIVE")
        connection.execute(_of_table("attach", self.schema, table))

    def _making(self) -> list[sql.Composed]:
        if not self.needs_table:
            return []
        schema = [statement("create_schema", self.schema)] if self.needs_schema else []
        install, grant = statement("install", self.schema), statement("grant", self.schema, role=sql.Identifier(self.role))
        return [sql.SQL(";\n").join([*schema, install, lease_statement("create", self.schema), grant])]

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
    kept = _detach(connection, schema, sorted(tables), _Patience(f"taking triggers of {schema} away"))
    if kept:
        _log.warning("tables keep their triggers", extra={"schema": schema, "kept": {str(table): why for table, why in kept.items()}})


def remove(connection: Connection, schema: str) -> None:
    """Take away everything, also what nobody has read. `LockWaitError` if a table is never free; then it can be said again."""
    with source_errors(f"removing the change table {schema}"):
        patience = _Patience(f"removing the change table {schema}")
        rows: list[Any] = connection.execute(query("change_table", "noted_tables"), {"schema": schema}).fetchall()
        kept = _detach(connection, schema, [TableName(*row) for row in rows], patience)
        # Those of tables that are not this role's own go with the schema, which is.
        busy = [table for table, why in kept.items() if why == LockWaitError.code]
        if busy:
            _log.warning("tables keep their triggers", extra={"schema": schema, "kept": [str(table) for table in busy]})
            raise LockWaitError(f"removing the change table {schema}: {', '.join(map(str, busy))} cannot be had, and keep their triggers")
        patience.insist(connection, partial(_drop, connection, schema))


def _detach(connection: Connection, schema: str, tables: Iterable[TableName], patience: _Patience) -> dict[TableName, str]:
    """Gives those that keep their triggers, each with a code that says why."""
    kept = {}
    for table in tables:
        try:
            patience.insist(connection, partial(_detach_one, connection, schema, table))
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
    connection.execute(_patience(_GLIMPSE_SECONDS))
    connection.execute(statement("remove", schema))


def _take(connection: Connection, table: TableName, mode: LiteralString = "ACCESS EXCLUSIVE") -> None:
    """Have a table, with all its partitions, or nothing: whoever comes later must not queue up behind us."""
    connection.execute(_patience(_GLIMPSE_SECONDS))
    name = sql.Identifier(table.schema, table.name)
    connection.execute(sql.SQL("LOCK TABLE {} IN {} MODE NOWAIT").format(name, sql.SQL(mode)))


def _patience(seconds: float) -> sql.Composed:
    return sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{seconds * 1000:.0f}ms"))


class _Patience:
    """Tries things, each in a transaction, again and again while somebody else has what they need; for so long in all, and no longer."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._deadline = time.monotonic() + LOCK_SECONDS

    def insist(self, connection: Connection, act: Callable[[], None]) -> None:
        while True:
            try:
                with connection.transaction():
                    connection.execute(_patience(LOCK_SECONDS))
                    act()
            except psycopg.errors.LockNotAvailable as error:
                if time.monotonic() > self._deadline:
                    raise LockWaitError(
                        f"{self._doing}: others have held locks for {LOCK_SECONDS:.0f} seconds that have to be waited for"
                    ) from error
                time.sleep(_PAUSE_SECONDS)
            else:
                return


def _of_table(name: LiteralString, schema: str, table: TableName) -> sql.Composed:
    rows, truncates = map(sql.Identifier, trigger_names(schema))
    return statement(name, schema, table=sql.Identifier(table.schema, table.name), rows=rows, truncates=truncates)
