"""The tables of a Postgres target as definitions: made, altered, put in place, dropped. All inside the caller's transaction.

A snapshot goes into a table of its own in the schema `penstock`. To put that in place is a matter of the catalog alone where nothing is
there yet, or where what is there has another shape. A table of the same shape is made equal to it instead: it is what views, grants and
further indexes hang on. That changes the rows that differ, and keeps nobody from reading meanwhile.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from penstock.postgres.applied import (
    OWN_SCHEMA,
    TargetColumn,
    column_types,
    ensure_prepared,
    is_prepared,
    is_there,
    target_transaction,
)
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.ownership import check_target_schema, check_target_table
from penstock.postgres.queries import query
from penstock.schema import TableName

_LONGEST_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class Alteration:
    """What happens to a table's columns, all at once. Travels to the executors."""

    renamed: Mapping[str, str]
    retyped: Sequence[TargetColumn]
    """By the names that they have from then on."""
    added: Sequence[TargetColumn]
    fills: Sequence[str | None]
    """What the rows that are there get in each of `added`."""


def staging_table(token: str) -> TableName:
    return TableName(OWN_SCHEMA, f"staging_{token}")


def table_name(place: TableName) -> sql.Identifier:
    return sql.Identifier(place.schema, place.name)


def probe_target(address: SourceAddress) -> None:
    """Try what any run will do: the schema `penstock`, a table in it, one for the keys of an epoch. None of it stays.

    A schema for tables is tried before the first run; later ones may have all that they need.
    """
    token = secrets.token_hex(8)
    with target_transaction(address, f"creating tables in {address.describe()}") as connection, connection.transaction(force_rollback=True):
        if not is_prepared(connection):
            ensure_schema(connection, f"penstock_check_{token}")
        ensure_prepared(connection)
        create_table(connection, staging_table(token), [TargetColumn("id")])
        connection.execute(
            sql.SQL(query("target", "keys_table")).format(
                keys=sql.Identifier("pg_temp", token), columns=sql.Identifier("id"), table=table_name(staging_table(token))
            )
        )


def ensure_schema(connection: Connection, schema: str) -> None:
    """Create a schema, unless it exists. One of a role that is not trusted is not used."""
    if not _has_schema(connection, schema):
        # Of two sessions that create it at once, one waits for the other and fails.
        with suppress(psycopg.errors.DuplicateSchema, psycopg.errors.UniqueViolation), connection.transaction():
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    check_target_schema(connection, schema)


def _has_schema(connection: Connection, schema: str) -> bool:
    return connection.execute(query("target", "has_schema"), {"schema": schema}).fetchone() == (True,)


def create_table(connection: Connection, place: TableName, columns: Sequence[TargetColumn]) -> None:
    """Without a key: it is not known yet whether the rows that come are one each."""
    types = column_types(connection, columns)
    listed = [_definition(column.name, type_name) for column, type_name in zip(columns, types, strict=True)]
    connection.execute(sql.SQL("CREATE TABLE {} ({})").format(table_name(place), sql.SQL(", ").join(listed)))


def add_columns(connection: Connection, place: TableName, columns: Sequence[TargetColumn], values: Sequence[str | None]) -> None:
    """Columns that have one value in every row that is there. The rows are not touched for it."""
    for column, type_name, value in zip(columns, column_types(connection, columns), values, strict=True):
        _alter(connection, place, sql.SQL("ADD COLUMN {} DEFAULT {}").format(_definition(column.name, type_name), sql.Literal(value)))
        _alter(connection, place, sql.SQL("ALTER COLUMN {} DROP DEFAULT").format(sql.Identifier(column.name)))


def alter_columns(connection: Connection, place: TableName, alteration: Alteration) -> None:
    """Nobody reads the table from here to the end of the transaction."""
    passing = {old: f"penstock_{secrets.token_hex(8)}" for old in alteration.renamed}
    for old, between in passing.items():  # names may be swapped
        _rename_column(connection, place, old, between)
    for old, new in alteration.renamed.items():
        _rename_column(connection, place, passing[old], new)
    types = column_types(connection, alteration.retyped)
    actions = [
        sql.SQL("ALTER COLUMN {} TYPE {}").format(sql.Identifier(column.name), _literal(type_name))
        for column, type_name in zip(alteration.retyped, types, strict=True)
    ]
    if actions:  # in one go, since it may have to write all rows anew
        _alter(connection, place, sql.SQL(", ").join(actions))
    add_columns(connection, place, alteration.added, alteration.fills)


def _rename_column(connection: Connection, place: TableName, old: str, new: str) -> None:
    _alter(connection, place, sql.SQL("RENAME COLUMN {} TO {}").format(sql.Identifier(old), sql.Identifier(new)))


def _alter(connection: Connection, place: TableName, action: sql.Composable) -> None:
    connection.execute(sql.SQL("ALTER TABLE {} {}").format(table_name(place), action))


def drop_table(connection: Connection, place: TableName) -> None:
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table_name(place)))


def empty_table(connection: Connection, place: TableName) -> None:
    connection.execute(sql.SQL("TRUNCATE {}").format(table_name(place)))


def put_in_place(connection: Connection, filled: TableName, place: TableName, key: Sequence[str]) -> None:
    """Make the table at `place` what `filled` is; `filled` itself is gone then."""
    columns = _columns(connection, filled)
    check_target_table(connection, place)
    if _columns(connection, place) == columns and set(_primary_key(connection, place)[0]) == set(key):
        _make_equal(connection, place, filled, list(columns), key)
        drop_table(connection, filled)
        return
    if key and not _primary_key(connection, filled)[0]:
        names = sql.SQL(", ").join(map(sql.Identifier, key))
        _alter(connection, filled, sql.SQL("ADD PRIMARY KEY ({})").format(names))
    ensure_schema(connection, place.schema)
    drop_table(connection, place)
    if filled.schema != place.schema:
        _alter(connection, filled, sql.SQL("SET SCHEMA {}").format(sql.Identifier(place.schema)))
    _alter(connection, TableName(place.schema, filled.name), sql.SQL("RENAME TO {}").format(sql.Identifier(place.name)))
    if key:
        _name_key(connection, place)


def difference(connection: Connection, place: TableName, columns: Sequence[TargetColumn], key: Sequence[str]) -> str | None:
    """Why the table at `place` cannot stay as it is with these columns and this primary key; None if it can."""
    wanted = dict(zip((column.name for column in columns), column_types(connection, columns), strict=True))
    found = _columns(connection, place)
    for name in [*found, *wanted]:
        if found.get(name) != wanted.get(name):
            return f"its column {name!r} is {found.get(name, 'not there')}, and the source's is {wanted.get(name, 'not there')}"
    has = _primary_key(connection, place)[0]
    return None if set(has) == set(key) else f"its primary key is ({', '.join(has)}), and the source's ({', '.join(key)})"


def _make_equal(connection: Connection, place: TableName, filled: TableName, names: Sequence[str], key: Sequence[str]) -> None:
    """Take out the rows that `filled` does not have, and put in those that only it has. Without a key that is all of them."""
    parts: dict[str, sql.Composable] = {
        "table": table_name(place),
        "filled": table_name(filled),
        "columns": sql.SQL(", ").join(map(sql.Identifier, names)),
        "columns_t": sql.SQL(", ").join(sql.Identifier("t", name) for name in names),
        "columns_f": sql.SQL(", ").join(sql.Identifier("f", name) for name in names),
        "match": sql.SQL(" AND ").join(sql.SQL("{} = {}").format(sql.Identifier("t", name), sql.Identifier("f", name)) for name in key)
        if key
        else sql.SQL("false"),
    }
    connection.execute(sql.SQL("ANALYZE {}").format(table_name(filled)))
    connection.execute(sql.SQL(query("target", "take_out_others")).format(**parts))
    connection.execute(sql.SQL(query("target", "put_in_missing")).format(**parts))


def _columns(connection: Connection, place: TableName) -> dict[str, str]:
    """By name, the columns' types as the server writes them. Their order means nothing to anybody."""
    rows: Any = connection.execute(query("target", "columns"), {"schema": place.schema, "table": place.name})
    return dict(rows.fetchall())


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


def _definition(name: str, type_name: str) -> sql.Composable:
    return sql.SQL("{} {}").format(sql.Identifier(name), _literal(type_name))


def _literal(type_name: str) -> sql.SQL:
    literal: Any = type_name  # as the server itself writes it
    return sql.SQL(literal)
