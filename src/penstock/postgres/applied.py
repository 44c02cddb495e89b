"""What a Postgres target knows of its tables: `penstock.applied`, and `penstock.chunks` while a table is being copied.

The position of a table is a row here, written in the transaction that writes the table. A table's place in the target is a `TableName` too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.errors import SinkError
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.lease import LEASES, lease_statement
from penstock.postgres.ownership import OwnSchema, OwnTable, lock_tables
from penstock.postgres.queries import query
from penstock.postgres.target_errors import target_errors
from penstock.schema import TableName

OWN_SCHEMA = "penstock"

_APPLIED = OwnTable(
    "applied",
    {
        **dict.fromkeys(("schema", "table", "pipeline", "source_schema", "source_table", "mode", "staging", "origin", "copy"), "text"),
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
    """One column of a table in the target: a type that has the same OID in every database, or text (`type_oid` 0)."""

    name: str
    type_oid: int = 0
    type_modifier: int = -1


@dataclass(frozen=True, slots=True)
class AppliedRecord:
    """One table as the target knows it."""

    pipeline: str
    source: TableName
    source_oid: int
    columns: tuple[TargetColumn, ...]
    key: tuple[str, ...]
    mode: str
    """What a row of the table stands for, in the sink's words."""
    position: Position | None
    staging: str | None
    """Names the table beside it into which it is being copied; or, with a position, was last."""
    origin: str | None = None
    """From which columns of the source its own are, in the sink's words; None: nobody wrote it down."""
    is_replaced: bool = False
    """Whether what stands there is not the table that was put there, but somebody's of the same name."""
    copy: str | None = None
    """Names the copy of the source that the table began with; None: nobody wrote it down."""


@contextmanager
def target_connection(address: SourceAddress, doing: str) -> Iterator[Connection]:
    """A connection of its own, on which every statement is a transaction."""
    with connect(address, "penstock target") as connection, target_errors(doing):
        yield connection


@contextmanager
def target_transaction(address: SourceAddress, doing: str) -> Iterator[Connection]:
    """A transaction on a connection of its own. If its end is not learned, the position tells which it was.

    The tables of the schema `penstock` are locked and checked first (`penstock.postgres.ownership`).
    """
    with target_connection(address, doing) as connection, connection.transaction():
        connection.execute(_PATIENCE)
        _OWN.lock(connection)
        _OWN.check(connection)
        yield connection


def is_prepared(connection: Connection) -> bool:
    """Whether the tables of the schema `penstock` exist. Raises `UntrustedObjectError` if they must not be used."""
    found = _OWN.check(connection)
    return found is not None and found.has(_APPLIED.name, _CHUNKS.name)


def ensure_prepared(connection: Connection) -> None:
    """Create the tables of the schema `penstock`, or upgrade those of an earlier version. First in a transaction.

    Nothing is executed if everything exists: CREATE … IF NOT EXISTS needs the right to create too. What was found is checked after that as
    well: another role may have created the schema in between.
    """
    for _ in range(_ATTEMPTS):
        found = _OWN.check(connection)
        if found is not None and not found.missing:
            return
        with suppress(*_MADE), connection.transaction():  # of two sessions that create them at once, one fails
            connection.execute(query("target", "prepare"))
            connection.execute(lease_statement("create", OWN_SCHEMA))
        _OWN.lock(connection)
    raise SinkError(f"schema {OWN_SCHEMA} is being changed by another session, again and again")


def load_record(connection: Connection, place: TableName) -> tuple[AppliedRecord | None, bool]:
    """What is known of a table, and whether there is one."""
    if not is_prepared(connection):
        return None, is_there(connection, place)
    row: Any = _one(connection, "load", place)
    pipeline, schema, table, oid, columns, key, mode, position, staging, origin, copy, is_replaced, exists = row
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
    return bool(_one(connection, "is_there", place)[0])


def lock_position(connection: Connection, place: TableName, pipeline: str) -> Position | None:
    """The position of the table, locked until the transaction ends. None too if it is not this pipeline's.

    The table itself is locked after its row, and compared with the row again after that: whoever owns its schema could have put another
    table in its place.
    """
    arguments = _names(place) | {"pipeline": pipeline}
    if connection.execute(query("target", "lock"), arguments).fetchone() is None:
        return None
    lock_tables(connection, [place])
    row: Any = connection.execute(query("target", "lock"), arguments).fetchone()
    return None if row is None or row[0] is None else Position.parse(row[0])


def record_begun(connection: Connection, place: TableName, record: AppliedRecord) -> None:
    """The table is being copied, into `record.staging`; it counts as no copy until that is finished."""
    arguments = {
        "pipeline": record.pipeline,
        "source_schema": record.source.schema,
        "source_table": record.source.name,
        "source_oid": record.source_oid,
        "mode": record.mode,
        "staging": record.staging,
    }
    connection.execute(query("target", "begin"), _names(place) | arguments | _shape(record))


def record_evolved(connection: Connection, place: TableName, record: AppliedRecord) -> None:
    """The table has the columns, the key and the origin of `record` from now on."""
    connection.execute(query("target", "evolve"), _names(place) | _shape(record))


def _shape(record: AppliedRecord) -> dict[str, object]:
    columns = [[column.name, column.type_oid, column.type_modifier] for column in record.columns]
    return {"columns": json.dumps(columns), "key": json.dumps(list(record.key)), "origin": record.origin}


def record_position(connection: Connection, place: TableName, pipeline: str, position: Position | None) -> None:
    _record(connection, "record", place, pipeline, position)


def record_settled(connection: Connection, place: TableName, pipeline: str, position: Position) -> None:
    """The table that is at `place` now has been put there by this transaction, and holds its source up to `position`."""
    _record(connection, "settle", place, pipeline, position)


def _record(connection: Connection, name: str, place: TableName, pipeline: str, position: Position | None) -> None:
    text = None if position is None else str(position)
    done = connection.execute(query("target", name), _names(place) | {"pipeline": pipeline, "position": text})
    if done.rowcount != 1:
        raise SinkError(f"the target no longer knows {place} as a table of pipeline {pipeline!r}")


def record_shape_of(connection: Connection, place: TableName, other: TableName) -> None:
    """From now on the table is made from what `other` is made from."""
    connection.execute(query("target", "describe"), _names(place) | {"from_schema": other.schema, "from_table": other.name})


def forget_record(connection: Connection, place: TableName, pipeline: str) -> None:
    connection.execute(query("target", "forget"), _names(place) | {"pipeline": pipeline})


def owned_tables(connection: Connection, pipeline: str, schema: str) -> list[TableName]:
    """The pipeline's tables in one schema of the target."""
    rows: Any = connection.execute(query("target", "owned"), {"pipeline": pipeline, "schema": schema})
    return [TableName(schema, name) for (name,) in rows]


def claim_chunk(connection: Connection, staging: str, number: int, fence: Position) -> tuple[Position, int] | None:
    """None if the chunk is the caller's to load; else the fence that it was read under, and its rows: somebody was first."""
    arguments = {"staging": staging, "number": number, "fence": str(fence)}
    if connection.execute(query("target", "claim_chunk"), arguments).fetchone() is not None:
        return None
    row: Any = connection.execute(query("target", "chunk"), arguments).fetchone()
    return Position.parse(row[0]), row[1]


def fill_chunk(connection: Connection, staging: str, number: int, rows: int) -> None:
    connection.execute(query("target", "fill_chunk"), {"staging": staging, "number": number, "rows": rows})


def load_chunks(connection: Connection, staging: str) -> dict[int, int]:
    """By number, the rows of the chunks that are there."""
    rows: Any = connection.execute(query("target", "chunks"), {"staging": staging})
    return dict(rows.fetchall())


def forget_chunks(connection: Connection, staging: str) -> None:
    connection.execute(query("target", "forget_chunks"), {"staging": staging})


def column_types(connection: Connection, columns: Sequence[TargetColumn]) -> list[str]:
    """How this server writes the columns' types."""
    arguments = {"oids": [column.type_oid for column in columns], "modifiers": [column.type_modifier for column in columns]}
    rows: Any = connection.execute(query("target", "column_types"), arguments)
    return [text for (text,) in rows]


def _one(connection: Connection, name: str, place: TableName | None = None) -> tuple[object, ...]:
    row = connection.execute(query("target", name), None if place is None else _names(place)).fetchone()
    assert row is not None
    return row


def _names(place: TableName) -> dict[str, object]:
    return {"schema": place.schema, "table": place.name}
