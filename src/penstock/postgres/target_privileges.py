"""What the role of a Postgres target lacks, each with the statement that gives it. Looked at, not tried."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from psycopg import sql

from penstock.errors import PrivilegeError
from penstock.postgres.applied import OWN_SCHEMA
from penstock.postgres.connection import Connection
from penstock.postgres.queries import query
from penstock.schema import TableName


def lacking_privileges(connection: Connection, places: Collection[TableName]) -> list[PrivilegeError]:
    """Everything that keeps a run from making and altering the tables at `places`."""
    ordered = sorted(places)
    arguments = {
        "schemas": sorted({OWN_SCHEMA, *(place.schema for place in ordered)}),
        "table_schemas": [place.schema for place in ordered],
        "tables": [place.name for place in ordered],
    }
    found: Any = connection.execute(query("target", "whoami")).fetchone()
    database, role, may_be_temporary = sql.Identifier(found[0]), sql.Identifier(found[1]), found[2]
    rows: Any = connection.execute(query("target", "lacking"), arguments).fetchall()
    lacks = [_lack(schema, table, is_there, database, role) for schema, is_there, table in rows]
    if may_be_temporary:
        return lacks
    grant = sql.SQL("GRANT TEMPORARY ON DATABASE {} TO {};").format(database, role)
    return [PrivilegeError("the role may not make temporary tables, which the keys of an epoch go into", hint=grant.as_string()), *lacks]


def _lack(schema: str, table: str | None, is_there: bool, database: sql.Identifier, role: sql.Identifier) -> PrivilegeError:
    if table is not None:
        owner = sql.SQL("ALTER TABLE {} OWNER TO {};").format(sql.Identifier(schema, table), role)
        return PrivilegeError(f"the table {TableName(schema, table)} belongs to another role", hint=owner.as_string())
    if is_there:
        grant = sql.SQL("GRANT USAGE, CREATE ON SCHEMA {} TO {};").format(sql.Identifier(schema), role)
        return PrivilegeError(f"the role may not put tables into the schema {schema!r}", hint=grant.as_string())
    grant = sql.SQL("GRANT CREATE ON DATABASE {} TO {};").format(database, role)
    return PrivilegeError(f"there is no schema {schema!r}, and the role may not make one", hint=grant.as_string())
