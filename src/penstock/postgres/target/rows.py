"""Rows of a Postgres target: load, delete and look up, inside the caller's transaction."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.copy_text import load_rows, read_texts
from penstock.postgres.queries import query
from penstock.postgres.target.ddl import staging_table, table_name
from penstock.postgres.target.state import OF_VALUES, claim_chunk, fill_chunk, load_record, target_transaction
from penstock.schema import TableName

_KEYS = sql.Identifier("pg_temp", "penstock_keys")
_LAST_BLOCK = (1 << 32) - 1

Blocks = Iterable[Sequence[pa.Array]]
"""Blocks of rows, each with one text array per column."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A chunk of a snapshot: the token and the columns of its staging table, and the number of the chunk."""

    token: str
    names: tuple[str, ...]
    number: int


def load_chunk(
    address: SourceAddress, chunk: ChunkPlace, fence: Position, blocks: Blocks
) -> tuple[int, Position]:
    """Load one chunk of a snapshot, and record it in the same transaction. Returns the number of rows, and
    the fence under which they were read. If there are several attempts, the first that completes counts: if
    an earlier attempt has completed, `blocks` are not read.
    """
    place = staging_table(chunk.token)
    with target_transaction(address, f"loading {place}") as connection:
        found = claim_chunk(connection, chunk.token, chunk.number, fence)
        if found is not None:
            return found[1], found[0]
        rows = load_rows(connection, table_name(place), chunk.names, blocks)
        fill_chunk(connection, chunk.token, chunk.number, rows)
        return rows, fence


def insert_rows(connection: Connection, place: TableName, names: Sequence[str], blocks: Blocks) -> int:
    return load_rows(connection, table_name(place), names, blocks)


def try_rows(connection: Connection, place: TableName, names: Sequence[str], blocks: Blocks) -> str | None:
    """Insert all rows or none. Returns the server's error without row values; None if it succeeded."""
    return try_writing(connection, lambda: insert_rows(connection, place, names, blocks))


def has_deferred_checks(connection: Connection, place: TableName) -> bool:
    """Whether the table has constraints that are checked at the end of the transaction."""
    row: Any = connection.execute(
        query("target", "has_deferred_checks"), {"schema": place.schema, "table": place.name}
    ).fetchone()
    return bool(row[0])


def try_writing(connection: Connection, write: Callable[[], object]) -> str | None:
    """Run a write atomically.

    Returns the server's error, including that of a deferred constraint, or None if the write succeeded.
    """
    try:
        with connection.transaction():
            write()
            with connection.transaction(
                force_rollback=True
            ):  # deferred again for the rest of the transaction
                connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
    except psycopg.Error as error:
        if (error.sqlstate or "")[:2] not in OF_VALUES:
            raise
        rule = error.diag.constraint_name or error.diag.column_name
        named = "" if rule is None else f", {rule!r}"
        return f"the target refuses it: {type(error).__name__} (SQLSTATE {error.sqlstate}{named})"
    return None


def delete_keys(connection: Connection, place: TableName, key: Sequence[str], blocks: Blocks) -> None:
    """Delete the rows with these keys, if they exist."""
    _load_keys(connection, place, key, blocks)
    statement = sql.SQL(query("target", "delete_keys")).format(
        table=table_name(place), keys=_KEYS, match=_match(key)
    )
    connection.execute(statement)
    _drop_keys(connection)


def delete_counted(connection: Connection, place: TableName, names: Sequence[str], blocks: Blocks) -> None:
    """Delete rows of a table without a key: for each row of `blocks`, as many equal rows as its last column
    says.
    """
    count = _unused_name(names)
    _create_keys(connection, place, names)
    connection.execute(sql.SQL("ALTER TABLE {} ADD COLUMN {} bigint").format(_KEYS, sql.Identifier(count)))
    load_rows(connection, _KEYS, [*names, count], blocks)
    sides = {
        f"columns_{side}": sql.SQL(", ").join(_column(side, name) for name in names) for side in ("t", "k")
    }
    statement = sql.SQL(query("target", "delete_rows")).format(
        table=table_name(place), keys=_KEYS, count=sql.Identifier(count), **sides
    )
    connection.execute(statement)
    _drop_keys(connection)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A lookup of rows: the columns to return, the key columns, and values that other columns must have."""

    names: Sequence[str]
    key: Sequence[str]
    values: Mapping[str, str]


def find_rows(
    connection: Connection, place: TableName, wanted: Wanted, blocks: Blocks | None
) -> Iterable[list[pa.StringArray]]:
    """Yield the rows whose keys are in `blocks`, or all rows if it is None. The caller must read all of them
    before it uses the connection again.
    """
    conditions = [
        sql.SQL("{} = {}").format(_column("t", name), sql.Literal(value))
        for name, value in wanted.values.items()
    ]
    where = sql.SQL(" AND ").join(conditions) if conditions else sql.SQL("true")
    columns = sql.SQL(", ").join(_column("t", name) for name in wanted.names)
    if blocks is None:
        statement = sql.SQL(query("target", "find_rows")).format(
            columns=columns, table=table_name(place), wanted=where
        )
        yield from read_texts(connection, statement.as_string(connection), len(wanted.names))
        return
    _load_keys(connection, place, wanted.key, blocks)
    statement = sql.SQL(query("target", "find_keys")).format(
        columns=columns, table=table_name(place), keys=_KEYS, match=_match(wanted.key), wanted=where
    )
    yield from read_texts(connection, statement.as_string(connection), len(wanted.names))
    _drop_keys(connection)


def count_blocks(connection: Connection, place: TableName) -> int:
    row: Any = connection.execute(
        query("target", "blocks"), {"schema": place.schema, "table": place.name}
    ).fetchone()
    return 0 if row is None else int(row[0])


def read_blocks(
    connection: Connection, place: TableName, names: Sequence[str], blocks: tuple[int, int | None]
) -> tuple[Position | None, Iterable[list[pa.StringArray]]]:
    """Return the position of the table, and its rows in a range of heap blocks. The connection cannot be used
    for anything else afterwards.
    """
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    record, _ = load_record(connection, place)
    first, last = (sql.Literal(f"({_LAST_BLOCK if block is None else block},0)") for block in blocks)
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    statement = sql.SQL(query("target", "read_blocks")).format(
        columns=columns, table=table_name(place), first=first, last=last
    )
    texts = read_texts(connection, statement.as_string(connection), len(names))
    return None if record is None else record.position, texts


def _unused_name(names: Sequence[str]) -> str:
    """Return a column name that is not among these."""
    return next(name for name in (f"count_{number}" for number in itertools.count()) if name not in names)


def _load_keys(connection: Connection, place: TableName, key: Sequence[str], blocks: Blocks) -> None:
    _create_keys(connection, place, key)
    load_rows(connection, _KEYS, key, blocks)
    # Without ANALYZE, the planner does not know the size of a new table.
    connection.execute(sql.SQL("ANALYZE {}").format(_KEYS))


def _create_keys(connection: Connection, place: TableName, names: Sequence[str]) -> None:
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    connection.execute(
        sql.SQL(query("target", "keys_table")).format(keys=_KEYS, columns=columns, table=table_name(place))
    )


def _drop_keys(connection: Connection) -> None:
    connection.execute(sql.SQL("DROP TABLE {}").format(_KEYS))


def _match(key: Sequence[str]) -> sql.Composable:
    return sql.SQL(" AND ").join(
        sql.SQL("{} = {}").format(_column("t", name), _column("k", name)) for name in key
    )


def _column(side: str, name: str) -> sql.Identifier:
    return sql.Identifier(side, name)
