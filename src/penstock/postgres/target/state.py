"""State of a Postgres target: `penstock.applied`, `penstock.chunks`, the lock of a run, and error
translation. `penstock.applied` contains the applied position of each table, and is updated in the transaction
that writes the rows. Error messages never contain row values: the server's message is quoted only if it can
contain only names and settings (`connection.safe_message`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.errors import (
    PenstockError,
    PipelineBusyError,
    PrivilegeError,
    SinkError,
    SinkRefusedError,
    SourceError,
    ValuesRefusedError,
)
from penstock.position import Position
from penstock.postgres.connection import (
    Connection,
    SourceAddress,
    classify,
    connect,
    is_about_names,
    safe_message,
)
from penstock.postgres.ownership import (
    LEASES,
    Lease,
    OwnSchema,
    OwnTable,
    lease_statement,
    lock_tables,
    lock_timeout,
)
from penstock.postgres.queries import query
from penstock.schema import TableName

_PASSING = frozenset({"25", "40"})  # a cancelled transaction, or a serialization conflict
OF_VALUES = frozenset({"22", "23"})

# SQLSTATEs of errors whose detail lists the dependent objects.
_WITH_DETAIL = frozenset({"2BP01", "0A000"})


@contextmanager
def target_errors(doing: str) -> Iterator[None]:
    """Translate the driver's errors; `doing` names the action for the message."""
    try:
        yield
    except psycopg.Error as error:
        raise _translated(error, doing) from None


def _translated(error: psycopg.Error, doing: str) -> PenstockError:
    state = error.sqlstate or ""
    if state[:2] in _PASSING or state == "55P03":
        return SinkError(f"{doing}: {type(error).__name__} (SQLSTATE {state})")
    if state[:2] in OF_VALUES:
        column = f", column {error.diag.column_name!r}" if error.diag.column_name else ""
        hint = (
            "see the server's log for the row, fix the target table or the source's value, and resync "
            "the table"
        )
        return ValuesRefusedError(f"{doing}: {type(error).__name__} (SQLSTATE {state}{column})", hint=hint)
    words = _words(error, state)
    if state == "42501":
        hint = (
            "grant it to the role in sink.postgres.dsn; tables to be altered or dropped must belong to "
            "that role"
        )
        return PrivilegeError(f"{doing}: {words}", hint=hint)
    found = classify(state, words, doing)
    return (
        SinkRefusedError(f"{doing}: {words} (SQLSTATE {state})", hint=_hint(error, state))
        if isinstance(found, SourceError)
        else found
    )


def _words(error: psycopg.Error, state: str) -> str:
    said = safe_message(error)
    detail = error.diag.message_detail if state in _WITH_DETAIL and is_about_names(error) else None
    return said if detail is None else f"{said}: {'; '.join(detail.splitlines())}"


def _hint(error: psycopg.Error, state: str) -> str:
    if not is_about_names(error):
        return "see the server's log: an object of the target, such as a trigger, rejected the rows"
    if state in _WITH_DETAIL:
        return (
            "drop the objects that the message names, restart the pipeline, and create them again when "
            "the table has been altered"
        )
    return error.diag.message_hint or "fix the cause in the message, and restart the pipeline"


OWN_SCHEMA = "penstock"

_APPLIED = OwnTable(
    "applied",
    {
        **dict.fromkeys(
            (
                "schema",
                "table",
                "pipeline",
                "source_schema",
                "source_table",
                "mode",
                "staging",
                "origin",
                "copy",
            ),
            "text",
        ),
        "source_oid": "bigint",
        "columns": "jsonb",
        "key": "jsonb",
        "position": "pg_lsn",
        "relation": "regclass",
    },
    added=frozenset({"relation", "origin", "copy"}),
)
_CHUNKS = OwnTable("chunks", {"staging": "text", "number": "integer", "fence": "pg_lsn", "rows": "bigint"})
_OWN = OwnSchema(OWN_SCHEMA, (_APPLIED, _CHUNKS, LEASES))
_MADE = (psycopg.errors.DuplicateSchema, psycopg.errors.DuplicateTable, psycopg.errors.UniqueViolation)

_ATTEMPTS = 3
_PATIENCE = "SET LOCAL lock_timeout = '60s'"


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of a target table. Its type has the same OID in every database, or is text (`type_oid` 0)."""

    name: str
    type_oid: int = 0
    type_modifier: int = -1


@dataclass(frozen=True, slots=True)
class AppliedRecord:
    """The recorded state of one target table."""

    pipeline: str
    source: TableName
    source_oid: int
    columns: tuple[TargetColumn, ...]
    key: tuple[str, ...]
    mode: str
    """The table mode, as the sink names it."""
    position: Position | None
    staging: str | None
    """The staging name of the copy in progress. After a copy, it stays set until the first epoch."""
    origin: str | None = None
    """The source columns from which the table's columns are made, as the sink encodes them; None if not
    recorded.
    """
    is_replaced: bool = False
    """Whether another table of the same name has replaced the recorded table."""
    copy: str | None = None
    """The staging name of the copy from which the table's rows come, which stays set; None if not recorded.
    """


@contextmanager
def target_connection(address: SourceAddress, doing: str) -> Iterator[Connection]:
    """Context manager for a new autocommit connection, with translated errors."""
    with connect(address, "penstock target") as connection, target_errors(doing):
        yield connection


@contextmanager
def target_transaction(address: SourceAddress, doing: str) -> Iterator[Connection]:
    """Context manager for a transaction on a new connection. If its outcome is unknown, the stored position
    tells whether it committed. The tables of the schema `penstock` are locked and checked first
    (`penstock.postgres.ownership`).
    """
    with target_connection(address, doing) as connection, connection.transaction():
        connection.execute(_PATIENCE)
        _OWN.lock(connection)
        _OWN.check(connection)
        yield connection


def is_prepared(connection: Connection) -> bool:
    """Whether the tables of the schema `penstock` exist.

    Raises `UntrustedObjectError` if they must not be used.
    """
    found = _OWN.check(connection)
    return found is not None and found.has(_APPLIED.name, _CHUNKS.name)


def ensure_prepared(connection: Connection) -> None:
    """Create the tables of the schema `penstock`, or upgrade those of an earlier version. Must come first in
    a transaction. Executes nothing if everything exists, since CREATE … IF NOT EXISTS needs the right to
    create. The result is checked again afterwards: another role may have created the schema in between.
    """
    for _ in range(_ATTEMPTS):
        found = _OWN.check(connection)
        if found is not None and not found.missing:
            return
        with suppress(*_MADE), connection.transaction():  # if two sessions create them at once, one fails
            connection.execute(query("target", "prepare"))
            connection.execute(lease_statement("create", OWN_SCHEMA))
        _OWN.lock(connection)
    raise SinkError(f"schema {OWN_SCHEMA} is being changed repeatedly by another session")


def load_record(connection: Connection, place: TableName) -> tuple[AppliedRecord | None, bool]:
    """Return the recorded state of a table, and whether the table exists."""
    if not is_prepared(connection):
        return None, is_there(connection, place)
    row: Any = _one(connection, "load", place)
    pipeline, schema, table, oid, columns, key, mode, position, staging, origin, copy, is_replaced, exists = (
        row
    )
    if pipeline is None:
        return None, bool(exists)
    record = AppliedRecord(
        pipeline,
        TableName(schema, table),
        oid,
        tuple(TargetColumn(*column) for column in columns),
        tuple(key),
        mode,
        None if position is None else Position.parse(position),
        staging,
        origin,
        is_replaced,
        copy,
    )
    return record, bool(exists)


def is_there(connection: Connection, place: TableName) -> bool:
    return bool(_one(connection, "exists", place)[0])


def lock_position(connection: Connection, place: TableName, pipeline: str) -> Position | None:
    """Lock the record of the table, and the table, until the transaction ends; returns the recorded position.
    Returns None if there is no position, or if the table is not this pipeline's. The record is read again
    after the table is locked, since the owner of the schema could have replaced the table in between.
    """
    arguments = _names(place) | {"pipeline": pipeline}
    if connection.execute(query("target", "lock"), arguments).fetchone() is None:
        return None
    lock_tables(connection, [place])
    row: Any = connection.execute(query("target", "lock"), arguments).fetchone()
    return None if row is None or row[0] is None else Position.parse(row[0])


def record_begun(connection: Connection, place: TableName, record: AppliedRecord) -> None:
    """Record that the table is being copied into `record.staging`. This clears the table's position until the
    copy is complete.
    """
    arguments = {
        "pipeline": record.pipeline,
        "source_schema": record.source.schema,
        "source_table": record.source.name,
        "source_oid": record.source_oid,
        "mode": record.mode,
        "staging": record.staging,
    }
    connection.execute(query("target", "record_begun"), _names(place) | arguments | _shape(record))


def record_evolved(connection: Connection, place: TableName, record: AppliedRecord) -> None:
    """Record the new columns, key and origin of the table."""
    connection.execute(query("target", "record_evolved"), _names(place) | _shape(record))


def _shape(record: AppliedRecord) -> dict[str, object]:
    columns = [[column.name, column.type_oid, column.type_modifier] for column in record.columns]
    return {"columns": json.dumps(columns), "key": json.dumps(list(record.key)), "origin": record.origin}


def record_position(
    connection: Connection, place: TableName, pipeline: str, position: Position | None
) -> None:
    _record(connection, "record_position", place, pipeline, position)


def record_settled(connection: Connection, place: TableName, pipeline: str, position: Position) -> None:
    """Record that this transaction has created or replaced the table at `place`, and that the table equals
    its source at `position`.
    """
    _record(connection, "record_settled", place, pipeline, position)


def _record(
    connection: Connection, name: str, place: TableName, pipeline: str, position: Position | None
) -> None:
    text = None if position is None else str(position)
    done = connection.execute(query("target", name), _names(place) | {"pipeline": pipeline, "position": text})
    if done.rowcount != 1:
        raise SinkError(f"the target no longer records {place} as a table of pipeline {pipeline!r}")


def record_shape_of(connection: Connection, place: TableName, other: TableName) -> None:
    """Record that the table has the columns and origin of `other`."""
    connection.execute(
        query("target", "copy_shape"), _names(place) | {"from_schema": other.schema, "from_table": other.name}
    )


def forget_record(connection: Connection, place: TableName, pipeline: str) -> None:
    connection.execute(query("target", "forget"), _names(place) | {"pipeline": pipeline})


def owned_tables(connection: Connection, pipeline: str, schema: str) -> list[TableName]:
    """Return the pipeline's tables in one schema of the target."""
    rows: Any = connection.execute(query("target", "owned"), {"pipeline": pipeline, "schema": schema})
    return [TableName(schema, name) for (name,) in rows]


def claim_chunk(
    connection: Connection, staging: str, number: int, fence: Position
) -> tuple[Position, int] | None:
    """Claim the chunk for loading. Returns None if the caller must load it. If an earlier attempt has loaded
    it, returns the fence and row count of that attempt.
    """
    arguments = {"staging": staging, "number": number, "fence": str(fence)}
    if connection.execute(query("target", "claim_chunk"), arguments).fetchone() is not None:
        return None
    row: Any = connection.execute(query("target", "chunk"), arguments).fetchone()
    return Position.parse(row[0]), row[1]


def fill_chunk(connection: Connection, staging: str, number: int, rows: int) -> None:
    connection.execute(query("target", "fill_chunk"), {"staging": staging, "number": number, "rows": rows})


def load_chunks(connection: Connection, staging: str) -> dict[int, int]:
    """Return the row counts of the loaded chunks, by number of the chunk."""
    rows: Any = connection.execute(query("target", "chunks"), {"staging": staging})
    return dict(rows.fetchall())


def forget_chunks(connection: Connection, staging: str) -> None:
    connection.execute(query("target", "forget_chunks"), {"staging": staging})


def column_types(connection: Connection, columns: Sequence[TargetColumn]) -> list[str]:
    """Return the names of the columns' types on this server."""
    arguments = {
        "oids": [column.type_oid for column in columns],
        "modifiers": [column.type_modifier for column in columns],
    }
    rows: Any = connection.execute(query("target", "column_types"), arguments)
    return [text for (text,) in rows]


def _one(connection: Connection, name: str, place: TableName | None = None) -> tuple[object, ...]:
    row = connection.execute(query("target", name), None if place is None else _names(place)).fetchone()
    assert row is not None
    return row


def _names(place: TableName) -> dict[str, object]:
    return {"schema": place.schema, "table": place.name}


_PATIENCE_SECONDS = 60.0


class TargetLock:
    """The lock of a run on a target.

    Taken when first needed, and again if its session was lost. Thread-safe.
    """

    def __init__(self, address: SourceAddress, pipeline: str) -> None:
        self._address = address
        self._pipeline = pipeline
        self._mutex = threading.Lock()
        self._held = ExitStack()
        self._connection: Connection | None = None

    def ensure(self) -> None:
        """Take the lock, unless this object holds it. Raises `PipelineBusyError` if another run holds it."""
        with self._mutex:
            if not self._is_held():
                self._close()
                self._take()

    @contextmanager
    def reading(self, doing: str) -> Iterator[Connection]:
        """Context manager for a connection for single read-only statements. This is the lock's connection if
        the lock is held, otherwise a new one.
        """
        held = self._connection
        if held is None or not self._is_held():
            with target_connection(self._address, doing) as connection:
                yield connection
        else:
            with target_errors(doing):
                yield held

    def close(self) -> None:
        with self._mutex:
            self._close()

    def _is_held(self) -> bool:
        try:
            return self._connection is not None and self._connection.execute("SELECT").rowcount == 1
        except psycopg.Error:
            return False

    def _take(self) -> None:
        doing = f"locking the tables of pipeline {self._pipeline!r} in {self._address.describe()}"
        connection = self._held.enter_context(target_connection(self._address, doing))
        with connection.transaction():
            connection.execute(lock_timeout(_PATIENCE_SECONDS))
            ensure_prepared(connection)
        holder = self._lease(connection).take()
        if holder is not None:
            self._close()
            raise PipelineBusyError(
                f"another run of pipeline {self._pipeline!r} writes to {self._address.describe()}: {holder}"
            )
        self._connection = connection

    def _lease(self, connection: Connection) -> Lease:
        return Lease(connection, OWN_SCHEMA, f"pipeline/{self._pipeline}")

    def _close(self) -> None:
        if self._connection is not None:
            self._lease(self._connection).release()
        self._connection = None
        self._held.close()
