"""The publication, which selects what the server streams, and the event trigger that logs column changes.

The publication must exist before the slot does: for each change, pgoutput reads the publication from the
catalog as of that change. `inspect_publication` and `inspect_relations` only read; `Addition.run` adds
missing tables, and waits for locks only briefly.

The event trigger is optional, and all pipelines of a database share it. Without it, the WAL shows a new
schema only with the table's next row change. With it, every ALTER TABLE writes a logical message in the same
transaction, with the numbers and names of the resulting columns. So a column that was dropped and added again
is distinguished from a renamed column, even if no row changed between two ALTER TABLE statements. Only a
superuser may create the event trigger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from penstock.errors import LockWaitError, PrivilegeError
from penstock.postgres.connection import Connection, source_errors
from penstock.postgres.ownership import LOCK_SECONDS, OwnSchema, OwnTable, Trust, lock_timeout, lock_wait_of
from penstock.postgres.queries import identifier, publication_query, query
from penstock.schema import TableName

_GENERATED_VERSION = 180_000

ONE_PUBLICATION = (
    "a capture uses one publication: name one that has all tables (ALTER PUBLICATION … ADD "
    "TABLE …), or run one pipeline for each publication"
)

OPERATIONS = ("insert", "update", "delete", "truncate")

# Indices of columns in the result of the statement `relations`.
_OID, _KEYLESS, _LISTED_FULL = 2, 11, 12


def names_several(text: str) -> bool:
    """Whether the text lists several publications, as a subscription may. A single name that contains a comma
    is not supported.
    """
    return "," in text


@dataclass(frozen=True, slots=True)
class Publication:
    """A row of pg_publication. `is_ours` means that this role may alter it."""

    name: str
    oid: int
    all_tables: bool
    insert: bool
    update: bool
    delete: bool
    truncate: bool
    via_root: bool
    owner: str
    is_ours: bool

    @property
    def omitted(self) -> tuple[str, ...]:
        """The operations that the publication does not publish."""
        return tuple(operation for operation in OPERATIONS if not getattr(self, operation))


@dataclass(frozen=True, slots=True)
class HeapIdentity:
    """A heap (a table or a partition) and its replica identity."""

    name: TableName
    identity: str
    """The replica identity as in pg_class.relreplident."""
    has_primary: bool
    is_immediate: bool
    """Whether the heap has a primary key that is not deferrable."""
    hidden: str | None
    """The kind of the generated columns in the replica identity that are not published: `v` virtual, `s`
    stored. None if there are no such columns.
    """


@dataclass(frozen=True, slots=True)
class Listing:
    """The column list that a publication should have for a table: the columns of the current list and those
    of the key. The row filter stays as it is.
    """

    columns: tuple[str, ...]
    row_filter: str | None
    lacks_key: bool
    """Whether the current list lacks columns of the key."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A requested table and its state in one publication. `oid` and all fields after it are None or false if
    there is no such relation.
    """

    name: TableName
    oid: int | None
    kind: str | None
    persistence: str | None
    root: TableName | None
    """The root table of a partition; None for other tables."""
    is_published: bool
    unidentified: tuple[HeapIdentity, ...]
    """The table itself, or partitions of it, on which UPDATE and DELETE would fail once the table is
    published.
    """
    apart: tuple[str, ...]
    """Unlogged and foreign partitions, whose changes are never in the WAL."""
    membership: int | None
    """The OID of the catalog entry that publishes the table by name. It changes if the table is removed from
    the publication and added again, even if only with another row filter.
    """
    listing: Listing | None
    """The required column list. It is set if the current list lacks key columns, or if heaps of the table
    have replica identity FULL; otherwise None.
    """
    listed_full: tuple[HeapIdentity, ...]
    """Heaps with replica identity FULL for which the publication has a column list, so that UPDATE and DELETE
    fail.
    """
    owner: str | None
    is_ours: bool
    is_reachable: bool
    """Whether the role has USAGE on the schema."""


def inspect_publication(connection: Connection, name: str) -> Publication | None:
    row: Any = connection.execute(query("publication", "publication"), {"publication": name}).fetchone()
    return None if row is None else Publication(name, *row)


def inspect_relations(
    connection: Connection, publication: str, tables: Iterable[TableName]
) -> list[Relation]:
    """Inspect all `tables`, in name order. Executes one statement, and a second one if a column list must be
    changed.
    """
    wanted = sorted(set(tables))
    parameters = {
        "publication": publication,
        "schemas": [table.schema for table in wanted],
        "names": [table.name for table in wanted],
    }
    statement = publication_query(connection.info.server_version, "publication", "relations")
    rows: list[Any] = connection.execute(statement, parameters).fetchall()
    faulty = {row[_OID]: bool(row[_KEYLESS]) for row in rows if row[_KEYLESS] or row[_LISTED_FULL]}
    listings = _inspect_listings(connection, publication, faulty) if faulty else {}
    return [_relation(row, listings.get(row[_OID])) for row in rows]


def _inspect_listings(
    connection: Connection, publication: str, lacking: Mapping[int, bool]
) -> dict[int, Listing]:
    """Return the required column lists by table OID. `lacking` says for each OID whether the current list
    lacks key columns. Raises `LockWaitError` if another session holds one of these tables locked: the server
    opens a table to print its row filter.
    """
    oids = list(lacking)
    try:
        with connection.transaction():
            connection.execute(lock_timeout(LOCK_SECONDS))
            rows: list[Any] = connection.execute(
                query("publication", "listings"), {"publication": publication, "oids": oids}
            ).fetchall()
    except psycopg.errors.LockNotAvailable as error:
        raise lock_wait_of(
            connection, oids, f"reading the row filters of publication {publication}", LOCK_SECONDS
        ) from error
    return {oid: Listing(tuple(columns), row_filter, lacking[oid]) for oid, columns, row_filter in rows}


def inspect_publisher(connection: Connection, publication: str, relations: Iterable[Relation]) -> str | None:
    """Return a role that may publish all `relations` in one statement: the owner of the publication, or of
    one of `relations`. None if only a superuser may.
    """
    parameters = {"publication": publication, "oids": [relation.oid for relation in relations]}
    row: Any = connection.execute(query("publication", "publishers"), parameters).fetchone()
    return None if row is None else row[0]


def _relation(row: Any, listing: Listing | None) -> Relation:
    (
        schema,
        name,
        oid,
        kind,
        persistence,
        root_schema,
        root_name,
        published,
        unidentified,
        apart,
        member,
        _,
        full,
        owner,
        ours,
        usable,
    ) = row
    return Relation(
        TableName(schema, name),
        oid,
        kind,
        persistence,
        None if root_schema is None else TableName(root_schema, root_name),
        bool(published),
        _heaps(unidentified),
        tuple(apart or ()),
        member,
        listing,
        _heaps(full),
        owner,
        bool(ours),
        bool(usable),
    )


def _heaps(rows: Any) -> tuple[HeapIdentity, ...]:
    return tuple(HeapIdentity(TableName(schema, name), *facts) for schema, name, *facts in rows or ())


@dataclass(frozen=True, slots=True)
class Addition:
    """The statement that adds tables to a publication, or creates it with them."""

    publication: str
    statement: sql.Composed
    oids: tuple[int, ...]
    """The OIDs of the relations that the statement locks."""

    @classmethod
    def plan(
        cls, connection: Connection, publication: str, missing: Collection[Relation], *, exists: bool
    ) -> Addition:
        name, tables = sql.Identifier(publication), _list(relation.name for relation in missing)
        if exists:
            statement = sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(name, tables)
        else:
            options: list[LiteralString] = ["publish_via_partition_root = true"]
            if connection.info.server_version >= _GENERATED_VERSION:
                options.append("publish_generated_columns = stored")
            statement = sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH ({})").format(
                name, tables, sql.SQL(", ".join(options))
            )
        return cls(
            publication, statement, tuple(relation.oid for relation in missing if relation.oid is not None)
        )

    @property
    def text(self) -> str:
        """The SQL statement, for error messages."""
        return f"{self.statement.as_string()};"

    def run(self, connection: Connection, *, keep: bool = True) -> bool:
        """Run the statement. Raises `LockWaitError` if a relation stays locked, so that applications do not
        queue behind the lock request. Without `keep` the statement is rolled back. Returns True if it
        succeeded, and False if another session has changed the publication since it was inspected; the caller
        must then inspect it again.
        """
        doing = f"adding tables to publication {self.publication}"
        with source_errors(doing):
            try:
                with connection.transaction(force_rollback=not keep):
                    connection.execute(lock_timeout(LOCK_SECONDS))
                    connection.execute(self.statement)
            except psycopg.errors.LockNotAvailable as error:
                raise self._lock_wait(connection, doing) from error
            except (psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
                return False
        return True

    def _lock_wait(self, connection: Connection, doing: str) -> LockWaitError:
        return lock_wait_of(connection, self.oids, doing, LOCK_SECONDS)


def drop_table(connection: Connection, publication: str, table: TableName) -> bool:
    """Remove a table from the publication, if the publication lists it by name and this role is allowed to.
    Returns whether the table was removed. A table that stays published does no harm.
    """
    statement = sql.SQL("ALTER PUBLICATION {} DROP TABLE {}").format(
        sql.Identifier(publication), _list([table])
    )
    try:
        with connection.transaction():
            connection.execute(lock_timeout(LOCK_SECONDS))
            connection.execute(statement)
    except (
        psycopg.errors.UndefinedObject,
        psycopg.errors.UndefinedTable,
        psycopg.errors.ObjectNotInPrerequisiteState,
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.LockNotAvailable,
    ):
        return False
    return True


def _list(tables: Iterable[TableName]) -> sql.Composed:
    return sql.SQL(", ").join(
        sql.SQL("ONLY {}").format(sql.Identifier(table.schema, table.name)) for table in sorted(tables)
    )


def drop_publication(connection: Connection, name: str) -> None:
    with source_errors(f"dropping publication {name}"):
        connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))


PREFIX = "penstock.ddl"
"""The prefix of the event trigger's messages."""

_OWN = OwnSchema("penstock_ddl", (OwnTable("secret", {"one": "boolean", "key": "text"}),), ("tell",))
_TRIGGERS = 2
_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '10s'"


def install_statements() -> str:
    """Return the statements for an administrator to run. Running them twice does no harm."""
    return f"{query('ddl_trigger', 'install').strip()};"


def is_installed(connection: Connection) -> bool:
    """Whether both event triggers exist and are enabled."""
    row = connection.execute(query("ddl_trigger", "inspect")).fetchone()
    return row is not None and row[0] == _TRIGGERS


def ensure_trigger(connection: Connection, *, keep: bool = True) -> None:
    """Create the event triggers and their function, or the missing ones. Raises `PrivilegeError`, with the
    statements to run, if this role may not create them. Without `keep` the statements are rolled back. Raises
    `UntrustedObjectError` if the function or its schema belongs to a role that is not trusted, even if
    everything is installed.
    """
    _OWN.check(connection)
    if is_installed(connection):
        return
    with source_errors("creating the event trigger"):
        try:
            with connection.transaction(force_rollback=not keep):
                connection.execute(_LOCK_TIMEOUT)
                _OWN.lock(connection)
                _OWN.check(connection)
                connection.execute(query("ddl_trigger", "install"))
                _OWN.check(connection)
        except psycopg.errors.InsufficientPrivilege as error:
            raise PrivilegeError(
                "this role may not create the event trigger that reports column changes",
                hint=install_statements(),
            ) from error
        except psycopg.errors.LockNotAvailable as error:
            raise LockWaitError(
                "the event trigger could not be created within 10 seconds: another session holds a lock"
            ) from error


def load_key(connection: Connection) -> bytes | None:
    """Return the key with which the event trigger signs its messages. None if there is no event trigger, or
    one of an earlier version that does not sign.
    """
    with source_errors("reading the key of the event trigger"):
        found = _OWN.check(connection)
        if found is None or not found.has("secret"):
            return None
        try:
            row = connection.execute(query("ddl_trigger", "key")).fetchone()
        except psycopg.errors.InsufficientPrivilege as error:
            role = identifier(Trust.load(connection).role)
            raise PrivilegeError(
                "this role may not read the key that signs the messages of the event trigger, so they are "
                "ignored",
                hint=f"GRANT USAGE ON SCHEMA penstock_ddl TO {role}; "
                f"GRANT SELECT ON penstock_ddl.secret TO {role};",
            ) from error
    return None if row is None else str(row[0]).encode()


def drop_trigger(connection: Connection) -> None:
    """Drop the event trigger, for all pipelines of the database."""
    with source_errors("removing the event trigger"):
        connection.execute(query("ddl_trigger", "remove"))
