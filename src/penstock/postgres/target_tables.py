"""The tables of a Postgres target: made, filled, put in place, changed. All inside the caller's transaction.

A snapshot goes into a table of its own in the schema `penstock`. To put that in place is a matter of the catalog alone where nothing is
there yet, or where what is there has another shape. A table of the same shape is filled anew instead: it is what views, grants and further
indexes hang on.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from psycopg import sql

from penstock.position import Position
from penstock.postgres.applied import (
    OWN_SCHEMA,
    TargetColumn,
    claim_chunk,
    column_types,
    ensure_prepared,
    fill_chunk,
    is_there,
    load_record,
    take_turns,
    target_transaction,
)
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.copying import read_texts
from penstock.postgres.loading import load_rows
from penstock.postgres.queries import query
from penstock.schema import TableName

_KEYS = sql.Identifier("pg_temp", "penstock_keys")
_COUNT = "_count"
_LONGEST_NAME_BYTES = 63
_LAST_BLOCK = (1 << 32) - 1

Blocks = Iterable[Sequence[pa.Array]]
"""Rows, some at a time: an array of text for each column."""


def staging_table(token: str) -> TableName:
    return TableName(OWN_SCHEMA, f"staging_{token}")


def probe_target(address: SourceAddress) -> None:
    """Try what a run will do first: the schema `penstock`, a table in it, a schema for tables. None of it stays."""
    token = secrets.token_hex(8)
    with target_transaction(address, f"creating tables in {address.describe()}") as connection, connection.transaction(force_rollback=True):
        ensure_prepared(connection)
        create_table(connection, staging_table(token), [TargetColumn("id")])
        ensure_schema(connection, f"penstock_check_{token}")


def ensure_schema(connection: Connection, schema: str) -> None:
    if not _has_schema(connection, schema):
        take_turns(connection)
        if not _has_schema(connection, schema):
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))


def _has_schema(connection: Connection, schema: str) -> bool:
    return connection.execute(query("target", "has_schema"), {"schema": schema}).fetchone() == (True,)


def create_table(connection: Connection, place: TableName, columns: Sequence[TargetColumn]) -> None:
    """Without a key: it is not known yet whether the rows that come are one each."""
    types = column_types(connection, columns)
    listed = [_definition(column.name, type_name) for column, type_name in zip(columns, types, strict=True)]
    connection.execute(sql.SQL("CREATE TABLE {} ({})").format(_table(place), sql.SQL(", ").join(listed)))


def add_constants(connection: Connection, place: TableName, columns: Sequence[TargetColumn], values: Sequence[str | None]) -> None:
    """Columns that have one value in every row that is there. The rows are not touched for it."""
    for column, type_name, value in zip(columns, column_types(connection, columns), values, strict=True):
        definition = _definition(column.name, type_name)
        connection.execute(sql.SQL("ALTER TABLE {} ADD COLUMN {} DEFAULT {}").format(_table(place), definition, sql.Literal(value)))
        drop = sql.SQL("ALTER TABLE {} ALTER COLUMN {} DROP DEFAULT").format(_table(place), sql.Identifier(column.name))
        connection.execute(drop)


def drop_table(connection: Connection, place: TableName) -> None:
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(_table(place)))


def empty_table(connection: Connection, place: TableName) -> None:
    connection.execute(sql.SQL("TRUNCATE {}").format(_table(place)))


def put_in_place(connection: Connection, filled: TableName, place: TableName, key: Sequence[str]) -> None:
    """Make the table at `place` what `filled` is; `filled` itself is gone then."""
    if _columns(connection, place) == _columns(connection, filled) and _primary_key(connection, place)[0] == list(key):
        connection.execute(sql.SQL("TRUNCATE {}").format(_table(place)))
        connection.execute(sql.SQL("INSERT INTO {} SELECT * FROM {}").format(_table(place), _table(filled)))
        drop_table(connection, filled)
        return
    if key and not _primary_key(connection, filled)[0]:
        names = sql.SQL(", ").join(map(sql.Identifier, key))
        connection.execute(sql.SQL("ALTER TABLE {} ADD PRIMARY KEY ({})").format(_table(filled), names))
    ensure_schema(connection, place.schema)
    drop_table(connection, place)
    if filled.schema != place.schema:
        connection.execute(sql.SQL("ALTER TABLE {} SET SCHEMA {}").format(_table(filled), sql.Identifier(place.schema)))
    moved = TableName(place.schema, filled.name)
    connection.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(_table(moved), sql.Identifier(place.name)))
    if key:
        _name_key(connection, place)


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A chunk of a snapshot: the staging table that it goes into, with its columns, and its number."""

    token: str
    names: tuple[str, ...]
    number: int


def load_chunk(address: SourceAddress, chunk: ChunkPlace, fence: Position, blocks: Blocks) -> tuple[int, Position]:
    """Load one chunk of a snapshot, with the record of it, in a transaction. Gives its rows and the fence that they were read under.

    Of several attempts at a chunk the first that gets to its end counts; `blocks` are not asked for if there is one.
    """
    place = staging_table(chunk.token)
    with target_transaction(address, f"loading {place}") as connection:
        found = claim_chunk(connection, chunk.token, chunk.number, fence)
        if found is not None:
            return found[1], found[0]
        rows = load_rows(connection, _table(place), chunk.names, blocks)
        fill_chunk(connection, chunk.token, chunk.number, rows)
        return rows, fence


def insert_rows(connection: Connection, place: TableName, names: Sequence[str], blocks: Blocks) -> int:
    return load_rows(connection, _table(place), names, blocks)


def delete_keys(connection: Connection, place: TableName, key: Sequence[str], blocks: Blocks) -> None:
    """Delete the rows under these keys, as far as they are there."""
    _load_keys(connection, place, key, blocks)
    statement = sql.SQL(query("target", "delete_keys")).format(table=_table(place), keys=_KEYS, match=_match(key))
    connection.execute(statement)
    _drop_keys(connection)


def delete_counted(connection: Connection, place: TableName, names: Sequence[str], blocks: Blocks) -> None:
    """Delete rows of a table without key: of those that are equal to a row of `blocks`, as many as its last column says."""
    _create_keys(connection, place, names)
    connection.execute(sql.SQL("ALTER TABLE {} ADD COLUMN {} bigint").format(_KEYS, sql.Identifier(_COUNT)))
    load_rows(connection, _KEYS, [*names, _COUNT], blocks)
    sides = {f"columns_{side}": sql.SQL(", ").join(_column(side, name) for name in names) for side in ("t", "k")}
    statement = sql.SQL(query("target", "delete_rows")).format(table=_table(place), keys=_KEYS, count=sql.Identifier(_COUNT), **sides)
    connection.execute(statement)
    _drop_keys(connection)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows to look for: those with these values, of which these columns are given."""

    names: Sequence[str]
    key: Sequence[str]
    values: Mapping[str, str]


def find_rows(connection: Connection, place: TableName, wanted: Wanted, blocks: Blocks | None) -> Iterable[list[pa.StringArray]]:
    """Those that stand under the keys in `blocks`, or all (None). They must be taken to the end before anything else is done."""
    conditions = [sql.SQL("{} = {}").format(_column("t", name), sql.Literal(value)) for name, value in wanted.values.items()]
    where = sql.SQL(" AND ").join(conditions) if conditions else sql.SQL("true")
    columns = sql.SQL(", ").join(_column("t", name) for name in wanted.names)
    if blocks is None:
        statement = sql.SQL(query("target", "find_rows")).format(columns=columns, table=_table(place), wanted=where)
        yield from read_texts(connection, statement.as_string(connection), len(wanted.names))
        return
    _load_keys(connection, place, wanted.key, blocks)
    statement = sql.SQL(query("target", "find_keys")).format(
        columns=columns, table=_table(place), keys=_KEYS, match=_match(wanted.key), wanted=where
    )
    yield from read_texts(connection, statement.as_string(connection), len(wanted.names))
    _drop_keys(connection)


def count_blocks(connection: Connection, place: TableName) -> int:
    row: Any = connection.execute(query("target", "blocks"), {"schema": place.schema, "table": place.name}).fetchone()
    return 0 if row is None else int(row[0])


def read_blocks(
    connection: Connection, place: TableName, names: Sequence[str], blocks: tuple[int, int | None]
) -> tuple[Position | None, Iterable[list[pa.StringArray]]]:
    """How far the table is, and the rows that it has then in some of its blocks. The connection is of no use for anything else after it."""
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    record, _ = load_record(connection, place)
    first, last = (sql.Literal(f"({_LAST_BLOCK if block is None else block},0)") for block in blocks)
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    statement = sql.SQL(query("target", "read_blocks")).format(columns=columns, table=_table(place), first=first, last=last)
    texts = read_texts(connection, statement.as_string(connection), len(names))
    return None if record is None else record.position, texts


def _load_keys(connection: Connection, place: TableName, key: Sequence[str], blocks: Blocks) -> None:
    _create_keys(connection, place, key)
    load_rows(connection, _KEYS, key, blocks)
    # A table just made looks to the planner as if it were of any size.
    connection.execute(sql.SQL("ANALYZE {}").format(_KEYS))


def _create_keys(connection: Connection, place: TableName, names: Sequence[str]) -> None:
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    connection.execute(sql.SQL(query("target", "keys_table")).format(keys=_KEYS, columns=columns, table=_table(place)))


def _drop_keys(connection: Connection) -> None:
    connection.execute(sql.SQL("DROP TABLE {}").format(_KEYS))


def _match(key: Sequence[str]) -> sql.Composable:
    return sql.SQL(" AND ").join(sql.SQL("{} = {}").format(_column("t", name), _column("k", name)) for name in key)


def _column(side: str, name: str) -> sql.Identifier:
    return sql.Identifier(side, name)


def _table(place: TableName) -> sql.Identifier:
    return sql.Identifier(place.schema, place.name)


def _definition(name: str, type_name: str) -> sql.Composable:
    literal: Any = type_name  # as the server itself writes it
    return sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(literal))


def _columns(connection: Connection, place: TableName) -> list[tuple[str, str]]:
    """The columns, each with its type as the server writes it."""
    rows: Any = connection.execute(query("target", "columns"), {"schema": place.schema, "table": place.name})
    return list(rows)


def _primary_key(connection: Connection, place: TableName) -> tuple[list[str], str | None]:
    """Its columns, and the name of its index."""
    row: Any = connection.execute(query("target", "primary_key"), {"schema": place.schema, "table": place.name}).fetchone()
    return ([], None) if row is None else (row[0], row[1])


def _name_key(connection: Connection, place: TableName) -> None:
    """The key is called as everybody's is, where that name is free."""
    name = f"{_cut(place.name, _LONGEST_NAME_BYTES - len('_pkey'))}_pkey"
    _, index = _primary_key(connection, place)
    if index is not None and not is_there(connection, TableName(place.schema, name)):
        old = sql.Identifier(place.schema, index)
        connection.execute(sql.SQL("ALTER INDEX {} RENAME TO {}").format(old, sql.Identifier(name)))


def _cut(name: str, length: int) -> str:
    return name.encode()[:length].decode(errors="ignore")
