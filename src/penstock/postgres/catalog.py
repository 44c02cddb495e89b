"""The current catalog: tables, columns, primary keys, types, and the identity of columns across schema
changes.

It is used to choose tables, to plan snapshots, and to check which schema the stream must reach. It is never
used to decode the stream, whose Relation messages describe past schemas.

`ALTER TYPE … RENAME VALUE` and `ADD` or `DROP ATTRIBUTE` change the text of stored values without a record in
the log. Adding an enum label changes no stored value. Renaming an attribute changes none either, since the
text of a composite value contains no attribute names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.change import METADATA_NAMES
from penstock.errors import NoTablesError, TableWithoutKeyError, UnsupportedTableError
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.pgoutput.relations import CatalogKey
from penstock.postgres.queries import identifier, publication_query, query
from penstock.postgres.types.column import TypePolicy
from penstock.postgres.types.registry import TypeFact, TypeResolver
from penstock.schema import Attributes, Column, TableName, TableSchema

_OIDS = 1 << 32

_KINDS = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "c": "a composite type",
    "i": "an index",
}


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """An ordinary or partitioned table, with its partitions; or a routed table, which consists of several
    tables.
    """

    oid: int
    name: TableName
    members: tuple[CatalogTable, ...] = ()
    """The source tables that are routed into this one, which itself does not exist in the source."""
    source_column: str = ""
    """The column that contains the name of a row's member."""

    @property
    def sources(self) -> tuple[CatalogTable, ...]:
        """The source tables that this table consists of: its members, or the table itself."""
        return self.members or (self,)


def inspect_tables(connection: Connection) -> list[CatalogTable]:
    """Return all tables that can be captured, in name order. Excludes tables in system schemas, partitions,
    temporary and unlogged tables, and those of `inspect_misnamed`.
    """
    rows: list[Any] = connection.execute(
        query("catalog", "tables"), {"without": list(inspect_misnamed(connection))}
    ).fetchall()
    return [CatalogTable(oid, TableName(schema, name)) for oid, schema, name in rows]


def inspect_outside(connection: Connection) -> list[tuple[TableName, str, str]]:
    """Return the views, materialized views, foreign and unlogged tables, with kind and persistence from the
    catalog.
    """
    rows: list[Any] = connection.execute(
        query("catalog", "outside"), {"without": list(inspect_misnamed(connection))}
    ).fetchall()
    return [(TableName(schema, name), kind, persistence) for schema, name, kind, persistence in rows]


def outside_kind(kind: str | None, persistence: str | None) -> str | None:
    """Return in words the kind of a relation whose changes are never in the WAL; None for a table that can be
    captured.
    """
    if kind not in ("r", "p"):
        return _KINDS.get(kind or "", "no table")
    return {"u": "unlogged", "t": "temporary"}.get(persistence or "")


@dataclass(frozen=True, slots=True)
class Misnamed:
    """A table that cannot be captured because one of its names is not UTF-8. Invalid bytes are shown as
    `\\xe9`.
    """

    name: TableName
    what: str
    """The object with the invalid name."""
    is_table: bool
    """Whether the relation could be captured if it were renamed. This is false for views and unlogged tables.
    """

    def error(self) -> UnsupportedTableError:
        return UnsupportedTableError(
            f"{self.what} has a name that is not UTF-8, and a SQL_ASCII database does not convert names",
            hint="rename it (ALTER TABLE … RENAME), or exclude the table",
        )


def inspect_misnamed(connection: Connection) -> dict[int, Misnamed]:
    """Return by OID the tables and views that have a name that is not UTF-8: their own name, or that of a
    column or partition. They exist only in SQL_ASCII databases. The server cannot send such a name as UTF-8,
    so every statement must exclude these relations.
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
    """Return the current names of relations, by OID. Omits dropped relations, and routed tables, whose
    numbers are not OIDs of the source.
    """
    wanted = [oid for oid in oids if oid < _OIDS]
    rows: list[Any] = (
        connection.execute(query("catalog", "names"), {"oids": wanted}).fetchall() if wanted else []
    )
    return {oid: TableName(schema, name) for oid, schema, name in rows}


@dataclass(frozen=True, slots=True)
class CatalogIdentity:
    """The columns that identify a table's rows, in table order. They are the columns of the replica
    identity's index or, without such an index, those of the primary key.
    """

    columns: tuple[str, ...]
    generated: frozenset[str]
    """The generated columns among `columns`."""
    is_full: bool
    """Whether the replica identity is FULL. `columns` are then those of the primary key."""

    def hidden(self, carried: Collection[str]) -> tuple[str, ...]:
        """Return the generated columns of the key that the stream does not contain. `carried` are the columns
        in the stream.
        """
        return tuple(name for name in self.columns if name in self.generated and name not in carried)

    def key(self, carried: Collection[str]) -> tuple[str, ...]:
        """Return the columns of the key in the stream, as a Relation message flags them, without hidden
        columns. Empty under replica identity FULL if a key column is hidden, since the message then flags all
        columns.
        """
        hidden = self.hidden(carried)
        return () if hidden and self.is_full else tuple(name for name in self.columns if name not in hidden)


_NO_IDENTITY = CatalogIdentity((), frozenset(), is_full=False)


def inspect_keys(connection: Connection, oids: Collection[int]) -> Mapping[int, CatalogIdentity]:
    """Return the identity of the relations `oids`, by OID; those without a key are omitted."""
    parameters = {"oids": list(oids)}
    rows: list[Any] = connection.execute(query("catalog", "keys"), parameters).fetchall()
    return {
        oid: CatalogIdentity(tuple(names), frozenset(generated), is_full)
        for oid, names, generated, is_full in rows
    }


def inspect_primary_key(connection: Connection, oid: int) -> CatalogKey | None:
    """Return a table's primary key, in table order, with the current WAL position; None if the table was
    dropped.
    """
    row: Any = connection.execute(query("catalog", "primary_key"), {"oid": oid}).fetchone()
    return None if row is None else CatalogKey(tuple(row[0]), Position.parse(row[1]).value)


def inspect_types(connection: Connection, oids: Sequence[int] | None = None) -> list[TypeFact]:
    """Return the catalog's definitions of types that are not built in: of the types `oids` and the types that
    they consist of, or of all types if `oids` is None.
    """
    rows: list[Any] = connection.execute(
        query("catalog", "types"), {"oids": None if oids is None else list(oids)}
    ).fetchall()
    return [TypeFact(*row) for row in rows]


def load_types(address: SourceAddress, oids: Sequence[int]) -> list[TypeFact]:
    """Inspect types as `inspect_types` does, over a new connection. Used when the stream contains a type that
    was created after the stream began.
    """
    with connect(address) as connection:
        return inspect_types(connection, oids)


def require_tables(connection: Connection, names: Sequence[TableName]) -> list[CatalogTable]:
    """Return the tables with these names, each once and in the given order. Raises `NoTablesError` if one
    cannot be captured.
    """
    known = {table.name: table for table in inspect_tables(connection)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise NoTablesError(
            f"the source has no table {', '.join(map(str, unknown))} that can be captured",
            hint="check the name, which is case-sensitive; for a partition, name its root table",
        )
    return [known[name] for name in dict.fromkeys(names)]


def inspect_schemas(
    connection: Connection,
    tables: Collection[CatalogTable],
    policy: TypePolicy | None = None,
    publication: str | None = None,
) -> dict[TableName, TableSchema]:
    """Return the current schemas of the tables, with the columns that the stream of `publication` contains.
    Executes a fixed number of statements.
    """
    oids = [table.oid for table in tables]
    statement = publication_query(connection.info.server_version, "catalog", "columns")
    rows: list[Any] = connection.execute(statement, {"oids": oids, "publication": publication}).fetchall()
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
        attributes = Attributes(
            tuple(numbers[table.oid]), *widths.get(table.oid, (0, "")), hidden_key=identity.hidden(names)
        )
        found[table.name] = TableSchema(table.oid, table.name, own, identity.key(names), attributes)
    return found


def _inspect_widths(connection: Connection, oids: Sequence[int]) -> dict[int, tuple[int, str]]:
    """Return for each table, by OID, the highest column number that was ever assigned, and a digest of the
    table's heaps and their filenodes. Dropped tables are omitted.
    """
    rows: list[Any] = connection.execute(query("attributes", "widths"), {"oids": oids}).fetchall()
    return {oid: (width, heap) for oid, width, heap in rows}


def inspect_schema(
    connection: Connection,
    table: CatalogTable,
    policy: TypePolicy | None = None,
    publication: str | None = None,
) -> TableSchema:
    """As `inspect_schemas`, for one table."""
    return inspect_schemas(connection, [table], policy, publication)[table.name]


class KeyFault(StrEnum):
    """The reason why a table has no usable key. MISSING means that no key is defined."""

    MISSING = "missing"
    NOTHING = "nothing"
    DEFERRABLE = "deferrable"
    GENERATED = "generated"
    """The key has a generated column that the stream does not contain."""

    def error(self, name: TableName) -> TableWithoutKeyError:
        what, fix = {
            KeyFault.MISSING: ("has no primary key", "ADD PRIMARY KEY (…);"),
            KeyFault.NOTHING: (
                "has REPLICA IDENTITY NOTHING, which puts no key into the log",
                "REPLICA IDENTITY DEFAULT;",
            ),
            KeyFault.DEFERRABLE: (
                "has a deferrable primary key, which Postgres does not log",
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
        hint = (
            f"ALTER TABLE {identifier(name.schema, name.name)} {fix} or choose the mode append for it, "
            "or exclude the table"
        )
        return TableWithoutKeyError(f"table {name} {what}, so its rows cannot be identified", hint=hint)


def inspect_key_faults(connection: Connection, schemas: Iterable[TableSchema]) -> dict[TableName, KeyFault]:
    """Return the tables among `schemas` without a usable key, with the reason."""
    schemas = list(schemas)
    generated = {
        schema.name: KeyFault.GENERATED
        for schema in schemas
        if schema.attributes is not None and schema.attributes.hidden_key
    }
    names = {schema.oid: schema.name for schema in schemas if not schema.key and schema.name not in generated}
    rows: list[Any] = (
        connection.execute(query("catalog", "key_faults"), {"oids": list(names)}).fetchall() if names else []
    )
    known = {oid: KeyFault.NOTHING if is_nothing else KeyFault.DEFERRABLE for oid, is_nothing in rows}
    return {**generated, **{name: known.get(oid, KeyFault.MISSING) for oid, name in names.items()}}


def inspect_whole_rows(connection: Connection, oids: Collection[int]) -> set[int]:
    """Return the subset of `oids` whose changes always contain the whole old row, because all heaps of the
    table have replica identity FULL.
    """
    rows: list[Any] = (
        connection.execute(query("catalog", "whole_rows"), {"oids": list(oids)}).fetchall() if oids else []
    )
    return {oid for (oid,) in rows}


def check_mirrorable(schema: TableSchema, fault: KeyFault | None = KeyFault.MISSING) -> None:
    """Raise an error with the reason if `schema` cannot be mirrored. `fault` is the reason why it has no
    usable key; None if it needs no key.
    """
    if fault is KeyFault.GENERATED or (not schema.key and fault is not None):
        raise fault.error(schema.name)
    if not schema.columns:
        raise UnsupportedTableError(
            f"table {schema.name} has no columns, so there is nothing to copy",
            hint="exclude the table, or give it a column",
        )
    seen: dict[str, str] = {}
    for name in schema.column_names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise UnsupportedTableError(
                f"table {schema.name} has columns {other!r} and {name!r}, which Spark cannot distinguish",
                hint="rename one of them, or exclude the table",
            )
    maps = [
        column for column in schema.columns if column.name in schema.key and _holds_map(column.arrow_type)
    ]
    if maps:
        raise UnsupportedTableError(
            f"table {schema.name} has the key column {maps[0].name!r}, which is stored as a map, and Spark "
            "cannot compare maps",
            hint="give the table another primary key or replica identity, or exclude it",
        )
    reserved = sorted(METADATA_NAMES & seen.keys())
    if reserved:
        raise UnsupportedTableError(
            f"table {schema.name} has a column named {reserved[0]!r}, "
            "which is reserved for a metadata column",
            hint="rename the column, or exclude the table",
        )


def _holds_map(arrow_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_map(arrow_type) or (pa.types.is_list(arrow_type) and _holds_map(arrow_type.value_type))
    )


_XIDS = 1 << 32


@dataclass(frozen=True, slots=True)
class MissingValue:
    """The default Postgres returns for rows older than the column (`pg_attribute.attmissingval`)."""

    text: str | None
    """The value as text. None if it is unknown: heaps of the table have different defaults, or the array
    delimiter of the type is not a comma.
    """


@dataclass(frozen=True, slots=True)
class CatalogShape:
    """A table's schema and default values under one snapshot of the catalog."""

    schema: TableSchema
    """The schema, with `attributes`. It has no columns if the table was dropped."""
    missing: Mapping[str, MissingValue]
    """By column name, the default value for rows older than the column. After the server has rewritten the
    rows, they contain the value themselves, and the catalog no longer has it.
    """
    next_xid: int
    unfinished: frozenset[int]

    def shows(self, xid: int) -> bool:
        """Whether the shape includes the effects of the transaction `xid`. The WAL may contain its commit
        before its effects are visible.
        """
        # A change contains only 32 bits of the transaction id, so the ids wrap around: half of all numbers
        # are in the past.
        past = (self.next_xid - xid) % _XIDS
        return 0 < past <= _XIDS // 2 and self.next_xid - past not in self.unfinished


def inspect_shape(
    connection: Connection,
    table: CatalogTable,
    policy: TypePolicy | None = None,
    publication: str | None = None,
) -> CatalogShape:
    """Inspect one table, in a transaction with one snapshot."""
    with connection.transaction():
        connection.execute(query("attributes", "repeatable_read"))
        row: Any = connection.execute(query("attributes", "open_transactions")).fetchone()
        schema = inspect_schema(connection, table, policy, publication)
        found: list[Any] = connection.execute(query("attributes", "missing"), {"oid": table.oid}).fetchall()
    missing = {
        name: MissingValue(texts[0] if is_everywhere and len(texts) == 1 else None)
        for name, texts, is_everywhere in found
    }
    return CatalogShape(schema, missing, row[0], frozenset(row[1]))


_FIRST_OWN_OID = 10_000


@dataclass(frozen=True, slots=True)
class TypeText:
    """The part of the definition of an enum or a composite type that determines the text of its values."""

    labels: tuple[tuple[int, str], ...] = ()
    """OID and name digest of each enum label, ordered by OID. A label keeps its OID when it is renamed."""
    attributes: str = ""
    """A digest of the numbers and types of the attributes of a composite type."""

    def sign(self, last: int | None = None) -> str:
        """Return the signature: the greatest OID of a label, and a digest of the definition. With `last`,
        labels with a greater OID are ignored.
        """
        if last is None:
            last = max((oid for oid, _ in self.labels), default=0)
        held = ",".join(f"{oid}:{label}" for oid, label in self.labels if oid <= last)
        return f"{last}:{hashlib.sha256(f'{held};{self.attributes}'.encode()).hexdigest()[:16]}"

    def is_signed(self, signature: str) -> bool:
        """Whether values stored under this signature still have the same text."""
        return self.sign(int(signature.partition(":")[0])) == signature


def inspect_type_texts(connection: Connection, oids: Collection[int]) -> dict[int, dict[int, TypeText]]:
    """Return for each type in `oids` the enums and composite types that it is or contains, by their OID."""
    found: dict[int, dict[int, TypeText]] = {}
    wanted = [oid for oid in oids if oid >= _FIRST_OWN_OID]
    rows: list[Any] = (
        connection.execute(query("catalog", "type_texts"), {"oids": wanted}).fetchall() if wanted else []
    )
    for root, oid, labels, names, attributes in rows:
        found.setdefault(root, {})[oid] = TypeText(tuple(zip(labels, names, strict=True)), attributes)
    return found
