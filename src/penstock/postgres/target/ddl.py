"""DDL of a Postgres target: create, alter, swap and drop tables inside the caller's transaction, and missing
privileges. A snapshot is loaded into a staging table in the schema `penstock`. If there is no target table
yet, or one with another schema, the staging table replaces it by a rename. A target table with the same
schema is kept, because views, grants and indexes depend on it: the rows that differ are changed, without
blocking readers.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from penstock.errors import PrivilegeError
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.ownership import check_target_schema, check_target_table
from penstock.postgres.queries import query
from penstock.postgres.target.state import (
    OWN_SCHEMA,
    TargetColumn,
    column_types,
    ensure_prepared,
    is_prepared,
    is_there,
    target_transaction,
)
from penstock.schema import TableName

_LONGEST_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class Alteration:
    """A change of a table's columns, applied in one step. It is sent to the executors."""

    renamed: Mapping[str, str]
    retyped: Sequence[TargetColumn]
    """The columns with a new type, under their new names."""
    added: Sequence[TargetColumn]
    fills: Sequence[str | None]
    """The value of existing rows in each of the `added` columns."""


def staging_table(token: str) -> TableName:
    return TableName(OWN_SCHEMA, f"staging_{token}")


def table_name(place: TableName) -> sql.Identifier:
    return sql.Identifier(place.schema, place.name)


def probe_target(address: SourceAddress) -> None:
    """Try the DDL that every run needs, and roll it back: create the schema `penstock`, a table in it, and a
    table for the keys of an epoch. The creation of a schema for target tables is tried only before the first
    run, since later runs may not need it.
    """
    token = secrets.token_hex(8)
    with (
        target_transaction(address, f"creating tables in {address.describe()}") as connection,
        connection.transaction(force_rollback=True),
    ):
        if not is_prepared(connection):
            ensure_schema(connection, f"penstock_check_{token}")
        ensure_prepared(connection)
        create_table(connection, staging_table(token), [TargetColumn("id")])
        connection.execute(
            sql.SQL(query("target", "keys_table")).format(
                keys=sql.Identifier("pg_temp", token),
                columns=sql.Identifier("id"),
                table=table_name(staging_table(token)),
            )
        )


def ensure_schema(connection: Connection, schema: str) -> None:
    """Create a schema if it does not exist. Raises if it belongs to a role that is not trusted."""
    if not _has_schema(connection, schema):
        # If two sessions create it at once, one waits for the other and fails.
        with (
            suppress(psycopg.errors.DuplicateSchema, psycopg.errors.UniqueViolation),
            connection.transaction(),
        ):
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    check_target_schema(connection, schema)


def _has_schema(connection: Connection, schema: str) -> bool:
    return connection.execute(query("target", "has_schema"), {"schema": schema}).fetchone() == (True,)


def create_table(connection: Connection, place: TableName, columns: Sequence[TargetColumn]) -> None:
    """Create a table without a primary key, since loaded rows may contain duplicates."""
    types = column_types(connection, columns)
    listed = [_definition(column.name, type_name) for column, type_name in zip(columns, types, strict=True)]
    connection.execute(sql.SQL("CREATE TABLE {} ({})").format(table_name(place), sql.SQL(", ").join(listed)))


def add_columns(
    connection: Connection, place: TableName, columns: Sequence[TargetColumn], values: Sequence[str | None]
) -> None:
    """Add columns with one value in all existing rows. The rows are not rewritten."""
    for column, type_name, value in zip(columns, column_types(connection, columns), values, strict=True):
        _alter(
            connection,
            place,
            sql.SQL("ADD COLUMN {} DEFAULT {}").format(
                _definition(column.name, type_name), sql.Literal(value)
            ),
        )
        _alter(connection, place, sql.SQL("ALTER COLUMN {} DROP DEFAULT").format(sql.Identifier(column.name)))


def alter_columns(connection: Connection, place: TableName, alteration: Alteration) -> None:
    """Alter columns. Readers wait until the transaction ends."""
    passing = {old: f"penstock_{secrets.token_hex(8)}" for old in alteration.renamed}
    for old, between in passing.items():  # columns may exchange their names
        _rename_column(connection, place, old, between)
    for old, new in alteration.renamed.items():
        _rename_column(connection, place, passing[old], new)
    types = column_types(connection, alteration.retyped)
    actions = [
        sql.SQL("ALTER COLUMN {} TYPE {}").format(sql.Identifier(column.name), _literal(type_name))
        for column, type_name in zip(alteration.retyped, types, strict=True)
    ]
    if actions:  # in one statement, since it may rewrite all rows
        _alter(connection, place, sql.SQL(", ").join(actions))
    add_columns(connection, place, alteration.added, alteration.fills)


def _rename_column(connection: Connection, place: TableName, old: str, new: str) -> None:
    _alter(
        connection, place, sql.SQL("RENAME COLUMN {} TO {}").format(sql.Identifier(old), sql.Identifier(new))
    )


def _alter(connection: Connection, place: TableName, action: sql.Composable) -> None:
    connection.execute(sql.SQL("ALTER TABLE {} {}").format(table_name(place), action))


def drop_table(connection: Connection, place: TableName) -> None:
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table_name(place)))


def empty_table(connection: Connection, place: TableName) -> None:
    connection.execute(sql.SQL("TRUNCATE {}").format(table_name(place)))


def replace_table(connection: Connection, filled: TableName, place: TableName, key: Sequence[str]) -> None:
    """Replace the table at `place` by `filled`. If both have the same columns and key, the rows at `place`
    are made equal to those of `filled`, and `filled` is dropped. Otherwise the table at `place` is dropped,
    and `filled` gets its name.
    """
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
    _alter(
        connection,
        TableName(place.schema, filled.name),
        sql.SQL("RENAME TO {}").format(sql.Identifier(place.name)),
    )
    if key:
        _name_key(connection, place)


def difference(
    connection: Connection, place: TableName, columns: Sequence[TargetColumn], key: Sequence[str]
) -> str | None:
    """Return the reason why the table at `place` cannot be kept with these columns and this primary key; None
    if it can.
    """
    wanted = dict(zip((column.name for column in columns), column_types(connection, columns), strict=True))
    found = _columns(connection, place)
    for name in [*found, *wanted]:
        if found.get(name) != wanted.get(name):
            return (
                f"its column {name!r} is {found.get(name, 'missing')}, and the source's is "
                f"{wanted.get(name, 'missing')}"
            )
    has = _primary_key(connection, place)[0]
    return (
        None
        if set(has) == set(key)
        else f"its primary key is ({', '.join(has)}), and the source's ({', '.join(key)})"
    )


def _make_equal(
    connection: Connection, place: TableName, filled: TableName, names: Sequence[str], key: Sequence[str]
) -> None:
    """Delete the rows that `filled` does not contain, and insert the missing ones. In a table without a key,
    all rows are deleted and inserted.
    """
    parts: dict[str, sql.Composable] = {
        "table": table_name(place),
        "filled": table_name(filled),
        "columns": sql.SQL(", ").join(map(sql.Identifier, names)),
        "columns_t": sql.SQL(", ").join(sql.Identifier("t", name) for name in names),
        "columns_f": sql.SQL(", ").join(sql.Identifier("f", name) for name in names),
        "match": sql.SQL(" AND ").join(
            sql.SQL("{} = {}").format(sql.Identifier("t", name), sql.Identifier("f", name)) for name in key
        )
        if key
        else sql.SQL("false"),
    }
    connection.execute(sql.SQL("ANALYZE {}").format(table_name(filled)))
    connection.execute(sql.SQL(query("target", "delete_other_rows")).format(**parts))
    connection.execute(sql.SQL(query("target", "insert_missing_rows")).format(**parts))


def _columns(connection: Connection, place: TableName) -> dict[str, str]:
    """Return the types of the columns by name, as the server writes them. The order of the columns does not
    matter.
    """
    rows: Any = connection.execute(query("target", "columns"), {"schema": place.schema, "table": place.name})
    return dict(rows.fetchall())


def _primary_key(connection: Connection, place: TableName) -> tuple[list[str], str | None]:
    """Return the columns of the primary key, and the name of its index; an empty list and None if there is no
    primary key.
    """
    row: Any = connection.execute(
        query("target", "primary_key"), {"schema": place.schema, "table": place.name}
    ).fetchone()
    return ([], None) if row is None else (row[0], row[1])


def _name_key(connection: Connection, place: TableName) -> None:
    """Rename the index of the primary key to Postgres' default name, if that name is free."""
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
    literal: Any = type_name  # in the server's own format
    return sql.SQL(literal)


def lacking_privileges(connection: Connection, places: Collection[TableName]) -> list[PrivilegeError]:
    """Return one error for each missing privilege that prevents a run from creating and altering the tables
    at `places`.
    """
    ordered = sorted(places)
    arguments = {
        "schemas": sorted({OWN_SCHEMA, *(place.schema for place in ordered)}),
        "table_schemas": [place.schema for place in ordered],
        "tables": [place.name for place in ordered],
    }
    found: Any = connection.execute(query("target", "current_role")).fetchone()
    database, role, may_be_temporary = sql.Identifier(found[0]), sql.Identifier(found[1]), found[2]
    rows: Any = connection.execute(query("target", "missing_privileges"), arguments).fetchall()
    lacks = [_lack(schema, table, is_there, database, role) for schema, is_there, table in rows]
    if may_be_temporary:
        return lacks
    grant = sql.SQL("GRANT TEMPORARY ON DATABASE {} TO {};").format(database, role)
    return [
        PrivilegeError(
            "the role may not create temporary tables, which an epoch needs for its keys",
            hint=grant.as_string(),
        ),
        *lacks,
    ]


def _lack(
    schema: str, table: str | None, is_there: bool, database: sql.Identifier, role: sql.Identifier
) -> PrivilegeError:
    if table is not None:
        owner = sql.SQL("ALTER TABLE {} OWNER TO {};").format(sql.Identifier(schema, table), role)
        return PrivilegeError(
            f"the table {TableName(schema, table)} belongs to another role", hint=owner.as_string()
        )
    if is_there:
        grant = sql.SQL("GRANT USAGE, CREATE ON SCHEMA {} TO {};").format(sql.Identifier(schema), role)
        return PrivilegeError(f"the role may not create tables in schema {schema!r}", hint=grant.as_string())
    grant = sql.SQL("GRANT CREATE ON DATABASE {} TO {};").format(database, role)
    return PrivilegeError(
        f"schema {schema!r} does not exist, and the role may not create it", hint=grant.as_string()
    )
