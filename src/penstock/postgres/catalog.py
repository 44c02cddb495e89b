"""The catalog of now: which tables there are, their columns and primary keys.

It chooses tables and plans snapshots. It never decodes the log: the log's own Relation messages do that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.change import METADATA_NAMES
from penstock.errors import TableWithoutKeyError, UnsupportedTableError
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.pgoutput.keys import CatalogKey
from penstock.postgres.queries import identifier, query
from penstock.postgres.types.policy import TypePolicy
from penstock.postgres.types.resolver import TypeFact, TypeResolver
from penstock.schema import Attributes, Column, TableName, TableSchema

_OIDS = 1 << 32


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """One ordinary or partitioned table; partitions are part of their root. Or several that are routed into one."""

    oid: int
    name: TableName
    members: tuple[CatalogTable, ...] = ()
    """The tables that are routed into this one, which the source itself does not have."""
    source_column: str = ""
    """In which the name of its member stands, in every row."""

    @property
    def sources(self) -> tuple[CatalogTable, ...]:
        """The tables of the source that it consists of."""
        return self.members or (self,)


def inspect_tables(connection: Connection) -> list[CatalogTable]:
    """All tables that could be captured, in name order. System schemas, partitions, temporary and unlogged tables are not, nor those of
    `inspect_misnamed`."""
    rows: list[Any] = connection.execute(query("catalog", "tables"), {"without": list(inspect_misnamed(connection))}).fetchall()
    return [CatalogTable(oid, TableName(schema, name)) for oid, schema, name in rows]


def inspect_outside(connection: Connection) -> list[tuple[TableName, str, str]]:
    """Views, materialized views, foreign and unlogged tables: name, kind and persistence, as the catalog has them."""
    rows: list[Any] = connection.execute(query("catalog", "outside"), {"without": list(inspect_misnamed(connection))}).fetchall()
    return [(TableName(schema, name), kind, persistence) for schema, name, kind, persistence in rows]


@dataclass(frozen=True, slots=True)
class Misnamed:
    """A table that cannot be captured, since a name of it is not UTF-8. Bytes that are not are shown as `\\xe9`."""

    name: TableName
    what: str
    """Which name it is."""
    is_table: bool
    """Whether it could be captured under another name; views and unlogged tables could not."""

    def error(self) -> UnsupportedTableError:
        return UnsupportedTableError(
            f"{self.what} has a name that is not UTF-8, and a SQL_ASCII database converts nothing",
            hint="rename it (ALTER TABLE … RENAME), or exclude the table",
        )


def inspect_misnamed(connection: Connection) -> dict[int, Misnamed]:
    """By OID, tables and views of which the own name, or that of a column or a partition, is not UTF-8.

    Only a SQL_ASCII database has them. The server refuses to send such a name, so every statement has to leave them out.
    """
    if connection.info.parameter_status("server_encoding") != "SQL_ASCII":
        return {}
    rows: list[Any] = connection.execute(query("catalog", "name_bytes")).fetchall()
    found: dict[int, Misnamed] = {}
    for oid, schema, name, relation, columns, is_table in rows:
        table = TableName(_shown(schema), _shown(name))
        column = next((each for each in columns if not _is_utf8(each)), None)
        if not _is_utf8(relation):
            found.setdefault(oid, Misnamed(table, f"relation {_shown(relation)} of table {table}", is_table))
        elif column is not None:
            found.setdefault(oid, Misnamed(table, f"column {_shown(column)} of table {table}", is_table))
    return found


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def inspect_names(connection: Connection, oids: Collection[int]) -> dict[int, TableName]:
    """What relations are called now, by OID. One that is gone has no name, nor has a number that stands for several tables."""
    wanted = [oid for oid in oids if oid < _OIDS]
    rows: list[Any] = connection.execute(query("catalog", "names"), {"oids": wanted}).fetchall() if wanted else []
    return {oid: TableName(schema, name) for oid, schema, name in rows}


@dataclass(frozen=True, slots=True)
class CatalogIdentity:
    """The columns that identify a table's rows, in table order: those of the replica identity's index, else of the primary key."""

    columns: tuple[str, ...]
    generated: frozenset[str]
    """Those of them that are generated."""
    is_full: bool
    """Whether whole rows go into the log, and the columns are those of the primary key."""

    def hidden(self, carried: Collection[str]) -> tuple[str, ...]:
        """Generated columns that are not among those that the stream carries."""
        return tuple(name for name in self.columns if name in self.generated and name not in carried)

    def key(self, carried: Collection[str]) -> tuple[str, ...]:
        """The key as the stream has it: without hidden columns, as a Relation message flags it; under FULL, where it flags all, a key of
        which a column is hidden is none."""
        hidden = self.hidden(carried)
        return () if hidden and self.is_full else tuple(name for name in self.columns if name not in hidden)


_NO_IDENTITY = CatalogIdentity((), frozenset(), is_full=False)


def inspect_keys(connection: Connection, oids: Collection[int]) -> Mapping[int, CatalogIdentity]:
    """What identifies the rows of the relations `oids`; those without any key are left out."""
    parameters = {"oids": list(oids)}
    rows: list[Any] = connection.execute(query("catalog", "keys"), parameters).fetchall()
    return {oid: CatalogIdentity(tuple(names), frozenset(generated), is_full) for oid, names, generated, is_full in rows}


def inspect_primary_key(connection: Connection, oid: int) -> CatalogKey | None:
    """A table's primary key, in table order, and where the log is by now; None if the table is gone."""
    row: Any = connection.execute(query("catalog", "primary_key"), {"oid": oid}).fetchone()
    return None if row is None else CatalogKey(tuple(row[0]), Position.parse(row[1]).value)


def inspect_types(connection: Connection, oids: Sequence[int] | None = None) -> list[TypeFact]:
    """What the catalog says about types that are not built in: these and those that they consist of, or all there are."""
    rows: list[Any] = connection.execute(query("catalog", "types"), {"oids": None if oids is None else list(oids)}).fetchall()
    return [TypeFact(*row) for row in rows]


def load_types(address: SourceAddress, oids: Sequence[int]) -> list[TypeFact]:
    """The same, over a connection of its own: for a stream that meets a type made after it began."""
    with connect(address) as connection:
        return inspect_types(connection, oids)


def inspect_schemas(
    connection: Connection, tables: Collection[CatalogTable], policy: TypePolicy | None = None, publication: str | None = None
) -> dict[TableName, TableSchema]:
    """The tables' shapes now, in the columns that the stream of `publication` also carries. A few statements, however many tables."""
    oids = [table.oid for table in tables]
    rows: list[Any] = connection.execute(query("catalog", "columns"), {"oids": oids, "publication": publication}).fetchall()
    types = TypeResolver(policy, load=partial(inspect_types, connection))
    types.prepare(row[2] for row in rows)
    columns: dict[int, list[Column]] = {oid: [] for oid in oids}
    numbers: dict[int, list[int]] = {oid: [] for oid in oids}
    for oid, name, type_oid, modifier, number in rows:
        columns[oid].append(types.column(name, type_oid, modifier))
        numbers[oid].append(number)
    keys, widths = inspect_keys(connection, oids), _inspect_widths(connection, oids)
    found: dict[TableName, TableSchema] = {}
    for table in tables:
        own, identity = tuple(columns[table.oid]), keys.get(table.oid, _NO_IDENTITY)
        names = [column.name for column in own]
        attributes = Attributes(tuple(numbers[table.oid]), *widths.get(table.oid, (0, "")), hidden_key=identity.hidden(names))
        found[table.name] = TableSchema(table.oid, table.name, own, identity.key(names), attributes)
    return found


def _inspect_widths(connection: Connection, oids: Sequence[int]) -> dict[int, tuple[int, str]]:
    """By OID, how many numbers were given to columns so far, and what stands for the heap. A table that is gone by now has none."""
    rows: list[Any] = connection.execute(query("attributes", "widths"), {"oids": oids}).fetchall()
    return {oid: (width, heap) for oid, width, heap in rows}


def inspect_schema(
    connection: Connection, table: CatalogTable, policy: TypePolicy | None = None, publication: str | None = None
) -> TableSchema:
    """The shape of one table."""
    return inspect_schemas(connection, [table], policy, publication)[table.name]


class KeyFault(StrEnum):
    """Why a table has no key: without any of these, because nobody made one."""

    MISSING = "missing"
    NOTHING = "nothing"
    DEFERRABLE = "deferrable"
    GENERATED = "generated"
    """The key has a generated column that the stream does not carry."""

    def error(self, name: TableName) -> TableWithoutKeyError:
        what, fix = {
            KeyFault.MISSING: ("has no primary key", "ADD PRIMARY KEY (…);"),
            KeyFault.NOTHING: ("has REPLICA IDENTITY NOTHING, which puts no key into the log", "REPLICA IDENTITY DEFAULT;"),
            KeyFault.DEFERRABLE: (
                "has a deferrable primary key, which does not go into the log",
                "REPLICA IDENTITY USING INDEX …; with another unique index, which is not deferrable;",
            ),
            KeyFault.GENERATED: (
                "has a generated column in its key, which the stream does not carry",
                (
                    "REPLICA IDENTITY FULL; or USING INDEX …; with a unique index without generated columns; "
                    "from Postgres 18 on also ALTER PUBLICATION … SET (publish_generated_columns = stored);"
                ),
            ),
        }[self]
        hint = f"ALTER TABLE {identifier(name.schema, name.name)} {fix} or choose the mode append for it, or exclude the table"
        return TableWithoutKeyError(f"table {name} {what}, so its rows cannot be told apart", hint=hint)


def inspect_key_faults(connection: Connection, schemas: Iterable[TableSchema]) -> dict[TableName, KeyFault]:
    """Of the tables among `schemas` that have no key, or not a whole one: why."""
    schemas = list(schemas)
    generated = {schema.name: KeyFault.GENERATED for schema in schemas if schema.attributes is not None and schema.attributes.hidden_key}
    names = {schema.oid: schema.name for schema in schemas if not schema.key and schema.name not in generated}
    rows: list[Any] = connection.execute(query("catalog", "key_faults"), {"oids": list(names)}).fetchall() if names else []
    known = {oid: KeyFault.NOTHING if is_nothing else KeyFault.DEFERRABLE for oid, is_nothing in rows}
    return {**generated, **{name: known.get(oid, KeyFault.MISSING) for oid, name in names.items()}}


def inspect_whole_rows(connection: Connection, oids: Collection[int]) -> set[int]:
    """Of the tables `oids`, those of which every change carries the whole old row: all of their heaps have replica identity FULL."""
    rows: list[Any] = connection.execute(query("catalog", "whole_rows"), {"oids": list(oids)}).fetchall() if oids else []
    return {oid for (oid,) in rows}


def check_mirrorable(schema: TableSchema, fault: KeyFault | None = KeyFault.MISSING) -> None:
    """Raise the error that names why `schema` cannot be mirrored, if there is a reason.

    `fault` is why it has no key, or not a whole one; None if it needs none.
    """
    if fault is KeyFault.GENERATED or (not schema.key and fault is not None):
        raise fault.error(schema.name)
    if not schema.columns:
        raise UnsupportedTableError(
            f"table {schema.name} has no columns, so there is nothing of its rows to keep", hint="exclude the table, or give it a column"
        )
    seen: dict[str, str] = {}
    for name in schema.column_names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise UnsupportedTableError(
                f"table {schema.name} has columns {other!r} and {name!r}, which Spark cannot tell apart",
                hint="rename one of them, or exclude the table",
            )
    maps = [column for column in schema.columns if column.name in schema.key and _holds_map(column.arrow_type)]
    if maps:
        raise UnsupportedTableError(
            f"table {schema.name} has the key column {maps[0].name!r}, which becomes a map, and Spark cannot compare maps",
            hint="give the table another primary key or replica identity, or exclude it",
        )
    reserved = sorted(METADATA_NAMES & seen.keys())
    if reserved:
        raise UnsupportedTableError(
            f"table {schema.name} has a column named {reserved[0]!r}, a name that change batches need for themselves",
            hint="rename the column, or exclude the table",
        )


def _holds_map(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_map(arrow_type) or (pa.types.is_list(arrow_type) and _holds_map(arrow_type.value_type)))
