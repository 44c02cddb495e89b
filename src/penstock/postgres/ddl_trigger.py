"""The event trigger that tells in the log what becomes of columns; optional, and one for all pipelines of a database.

Without it the log shows only the shape that changes have. With it every ALTER TABLE leaves a message in its own transaction, with the
numbers and names of the columns afterwards, so that a drop and an add between which nobody wrote are no riddle. Only a superuser may create
it.
"""

from __future__ import annotations

import psycopg

from penstock.errors import LockWaitError, PrivilegeError
from penstock.postgres.connection import Connection, source_errors
from penstock.postgres.ownership import OwnSchema, OwnTable, Trust
from penstock.postgres.queries import identifier, query

PREFIX = "penstock.ddl"
"""Of the messages."""

_OWN = OwnSchema("penstock_ddl", (OwnTable("secret", {"one": "boolean", "key": "text"}),), ("tell",))
_TRIGGERS = 2
_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '10s'"


def install_statements() -> str:
    """The statements for an administrator to run. Running them twice does no harm."""
    return f"{query('ddl_trigger', 'install').strip()};"


def is_installed(connection: Connection) -> bool:
    """Whether both event triggers exist and are enabled."""
    row = connection.execute(query("ddl_trigger", "inspect")).fetchone()
    return row is not None and row[0] == _TRIGGERS


def ensure_trigger(connection: Connection, *, keep: bool = True) -> None:
    """Create what is missing. Raises `PrivilegeError`, with the statements, if this role may not. Without `keep` it is only tried.

    Raises `UntrustedObjectError` if the function or its schema belongs to a role that is not trusted, also where everything is installed.
    """
    _OWN.check(connection)
    if is_installed(connection):
        return
    with source_errors("creating the event trigger"):
        try:
            with connection.transaction(force_rollback=not keep):
                connection.execute(_LOCK_TIMEOUT)
                connection.execute(query("ddl_trigger", "install"))
                _OWN.check(connection)
        except psycopg.errors.InsufficientPrivilege as error:
            raise PrivilegeError(
                "this role may not create the event trigger that reports column changes", hint=install_statements()
            ) from error
        except psycopg.errors.LockNotAvailable as error:
            raise LockWaitError("the event trigger could not be created within 10 seconds: another session holds a lock") from error


def load_key(connection: Connection) -> bytes | None:
    """The key by which messages of the event trigger are told from forged ones. None if there is no event trigger that signs them."""
    with source_errors("reading the key of the event trigger"):
        found = _OWN.check(connection)
        if found is None or not found.has("secret"):
            return None
        try:
            row = connection.execute(query("ddl_trigger", "key")).fetchone()
        except psycopg.errors.InsufficientPrivilege as error:
            role = identifier(Trust.load(connection).role)
            raise PrivilegeError(
                "this role may not read the key that signs the messages of the event trigger, so they are ignored",
                hint=f"GRANT USAGE ON SCHEMA penstock_ddl TO {role}; GRANT SELECT ON penstock_ddl.secret TO {role};",
            ) from error
    return None if row is None else str(row[0]).encode()


def drop_trigger(connection: Connection) -> None:
    """Remove it, for all pipelines of the database."""
    with source_errors("removing the event trigger"):
        connection.execute(query("ddl_trigger", "remove"))
