"""The publication: what the server puts into the stream.

It must exist before the slot does: pgoutput decides what is published by the catalog as of the change. `inspect_publication` and
`inspect_relations` only look; an `Addition` is the statement that closes a gap, and never waits long for somebody else's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from penstock.errors import LockWaitError
from penstock.postgres.connection import Connection, source_errors
from penstock.postgres.lease import LOCK_SECONDS, lock_wait_of
from penstock.postgres.queries import query
from penstock.schema import TableName

_SCHEMAS_VERSION = 150_000
_GENERATED_VERSION = 180_000

ONE_PUBLICATION = (
    "changes come by one publication: give the name of one that has all the tables (ALTER PUBLICATION … ADD TABLE …), or a pipeline to each"
)

OPERATIONS = ("insert", "update", "delete", "truncate")

# Where these stand in a row of the statement `relations`.
_OID, _KEYLESS, _LISTED_FULL = 2, 11, 12


def names_several(text: str) -> bool:
    """Whether somebody has listed publications, as a subscription may; a single name with a comma in it is not worth the doubt."""
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
        """The operations that it leaves out."""
        return tuple(operation for operation in OPERATIONS if not getattr(self, operation))


@dataclass(frozen=True, slots=True)
class HeapIdentity:
    """A heap, and what tells its rows apart in the log, or would."""

    name: TableName
    identity: str
    """As in pg_class.relreplident."""
    has_primary: bool
    is_immediate: bool
    """Whether there is a primary key that is not deferrable."""
    hidden: str | None
    """Whether generated columns are part of the identity, but not of what is published: `v` virtual ones, `s` stored ones."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a publication should list of a table: the columns that it lists now and those of the key, under the same row filter."""

    columns: tuple[str, ...]
    row_filter: str | None
    lacks_key: bool
    """Whether it does not list them all now."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A table that somebody asks for, beside one publication. `oid` and all after it are None or false if there is no such relation."""

    name: TableName
    oid: int | None
    kind: str | None
    persistence: str | None
    root: TableName | None
    """Of a partition: the table that it is a part of."""
    is_published: bool
    unidentified: tuple[HeapIdentity, ...]
    """Where UPDATE and DELETE would fail once it is published: the table itself, or partitions of it."""
    apart: tuple[str, ...]
    """Partitions whose changes never enter the log: unlogged or foreign ones."""
    membership: int | None
    """Which act put it into the publication by name: taken out and put in again, or put in with another filter, it is another one."""
    listing: Listing | None
    """If the publication lists columns, but not all of the key, or of heaps under replica identity FULL."""
    listed_full: tuple[HeapIdentity, ...]
    """Heaps under replica identity FULL of which the publication lists columns: there UPDATE and DELETE fail."""
    owner: str | None
    is_ours: bool
    is_reachable: bool
    """Whether the role may use the schema."""


def inspect_publication(connection: Connection, name: str) -> Publication | None:
    row: Any = connection.execute(query("publication", "publication"), {"publication": name}).fetchone()
    return None if row is None else Publication(name, *row)


def inspect_relations(connection: Connection, publication: str, tables: Iterable[TableName]) -> list[Relation]:
    """All `tables` in name order, in one statement however many there are."""
    wanted = sorted(set(tables))
    parameters = {
        "publication": publication,
        "schemas": [table.schema for table in wanted],
        "names": [table.name for table in wanted],
    }
    rows: list[Any] = connection.execute(query("publication", "relations"), parameters).fetchall()
    faulty = {row[_OID]: bool(row[_KEYLESS]) for row in rows if row[_KEYLESS] or row[_LISTED_FULL]}
    listings = _inspect_listings(connection, publication, faulty) if faulty else {}
    return [_relation(row, listings.get(row[_OID])) for row in rows]


def _inspect_listings(connection: Connection, publication: str, lacking: Mapping[int, bool]) -> dict[int, Listing]:
    parameters = {"publication": publication, "oids": list(lacking)}
    rows: list[Any] = connection.execute(query("publication", "listings"), parameters).fetchall()
    return {oid: Listing(tuple(columns), row_filter, lacking[oid]) for oid, columns, row_filter in rows}


def inspect_publisher(connection: Connection, publication: str, relations: Iterable[Relation]) -> str | None:
    """Of those who own something here: a role that may publish all `relations` in one statement. None if only a superuser may."""
    parameters = {"publication": publication, "oids": [relation.oid for relation in relations]}
    row: Any = connection.execute(query("publication", "publishers"), parameters).fetchone()
    return None if row is None else row[0]


def inspect_memberships(connection: Connection, publication: str, tables: Iterable[TableName]) -> dict[TableName, str]:
    """For each table that is published: a text that stays the same for as long as it has been in this publication without a break."""
    found = inspect_publication(connection, publication)
    if found is None:
        return {}
    acts: dict[str, int] = {}
    if connection.info.server_version >= _SCHEMAS_VERSION:
        rows: list[Any] = connection.execute(query("publication", "schemas"), {"publication": found.oid}).fetchall()
        acts = dict(rows)

    def act(each: Relation) -> object:
        return each.membership or (f"schema-{acts[each.name.schema]}" if each.name.schema in acts else "all")

    return {each.name: f"{found.oid}/{act(each)}" for each in inspect_relations(connection, publication, tables) if each.is_published}


def _relation(row: Any, listing: Listing | None) -> Relation:
    schema, name, oid, kind, persistence, root_schema, root_name, published, unidentified, apart, member, _, full, owner, ours, usable = row
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
    """The one statement that makes a publication hold further tables, and creates it first if need be."""

    publication: str
    statement: sql.Composed
    oids: tuple[int, ...]
    """The relations that it locks."""

    @classmethod
    def plan(cls, connection: Connection, publication: str, missing: Collection[Relation], *, exists: bool) -> Addition:
        name, tables = sql.Identifier(publication), _list(relation.name for relation in missing)
        if exists:
            statement = sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(name, tables)
        else:
            options: list[LiteralString] = ["publish_via_partition_root = true"]
            if connection.info.server_version >= _GENERATED_VERSION:
                options.append("publish_generated_columns = stored")
            statement = sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH ({})").format(name, tables, sql.SQL(", ".join(options)))
        return cls(publication, statement, tuple(relation.oid for relation in missing if relation.oid is not None))

    @property
    def text(self) -> str:
        """To be pasted."""
        return f"{self.statement.as_string()};"

    def run(self, connection: Connection, *, keep: bool = True) -> bool:
        """Run it, and give up if a relation stays locked: an application must not queue up behind us. Without `keep` it is only tried.

        Gives back whether it was done; not if somebody else was faster, so that there is something new to look at.
        """
        doing = f"adding tables to publication {self.publication}"
        with source_errors(doing):
            try:
                with connection.transaction(force_rollback=not keep):
                    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{LOCK_SECONDS:.0f}s")))
                    connection.execute(self.statement)
            except psycopg.errors.LockNotAvailable as error:
                raise self._lock_wait(connection, doing) from error
            except (psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
                return False
        return True

    def _lock_wait(self, connection: Connection, doing: str) -> LockWaitError:
        return lock_wait_of(connection, self.oids, doing, LOCK_SECONDS)


def drop_table(connection: Connection, publication: str, table: TableName) -> bool:
    """Take a table out, if it is in by name and this role may; gives back whether that was done. One that stays in does no harm."""
    statement = sql.SQL("ALTER PUBLICATION {} DROP TABLE {}").format(sql.Identifier(publication), _list([table]))
    try:
        with connection.transaction():
            connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(f"{LOCK_SECONDS:.0f}s")))
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
    return sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(table.schema, table.name)) for table in sorted(tables))


def drop_publication(connection: Connection, name: str) -> None:
    with source_errors(f"dropping publication {name}"):
        connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))
