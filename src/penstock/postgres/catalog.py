"""The catalog of now: which tables there are, their columns and primary keys.

It chooses tables and plans snapshots. It never decodes the log: the log's own Relation messages do that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
from penstock.schema import Column, TableName, TableSchema


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """One ordinary or partitioned table; partitions are part of their root."""

    oid: int
    name: TableName


def inspect_tables(connection: Connection) -> list[CatalogTable]:
    """All tables that could be captured, in name order. System schemas, partitions, temporary and unlogged tables are not."""
    rows: list[Any] = connection.execute(query("catalog", "tables")).fetchall()
    return [CatalogTable(oid, TableName(schema, name)) for oid, schema, name in rows]


def inspect_outside(connection: Connection) -> list[tuple[TableName, str, str]]:
    """Views, materialized views, foreign and unlogged tables: name, kind and persistence, as the catalog has them."""
    rows: list[Any] = connection.execute(query("catalog", "outside")).fetchall()
    return [(TableName(schema, name), kind, persistence) for schema, name, kind, persistence in rows]


def inspect_keys(connection: Connection, oids: Collection[int] | None = None) -> Mapping[int, tuple[str, ...]]:
    """Relation OID → the columns that tell its rows apart, in table order: the replica identity's index, else the primary key.

    Of the relations `oids`, or of all there are.
    """
    parameters = {"oids": None if oids is None else list(oids)}
    rows: list[Any] = connection.execute(query("catalog", "keys"), parameters).fetchall()
    return {oid: tuple(names) for oid, names in rows}


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
    types.prepare(type_oid for _, _, type_oid, _ in rows)
    columns: dict[int, list[Column]] = {oid: [] for oid in oids}
    for oid, name, type_oid, modifier in rows:
        columns[oid].append(types.column(name, type_oid, modifier))
    keys = inspect_keys(connection, oids)
    return {table.name: TableSchema(table.oid, table.name, tuple(columns[table.oid]), keys.get(table.oid, ())) for table in tables}


def inspect_schema(
    connection: Connection, table: CatalogTable, policy: TypePolicy | None = None, publication: str | None = None
) -> TableSchema:
    """The shape of one table."""
    return inspect_schemas(connection, [table], policy, publication)[table.name]


def check_mirrorable(schema: TableSchema) -> None:
    """Raise the error that names why `schema` cannot be mirrored, if there is a reason."""
    if not schema.key:
        raise TableWithoutKeyError(
            f"table {schema.name} has no primary key (or its replica identity is NOTHING), so its rows cannot be told apart",
            hint=f"ALTER TABLE {identifier(schema.name.schema, schema.name.name)} ADD PRIMARY KEY (…); or exclude the table",
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
