"""State of tables in a Postgres target, read without Spark, and the plan of their column changes.

The target server changes columns as the source server did: a wider type holds the same values, and the
default of an added column applies to all existing rows. Penstock copies the changes of earlier schema
versions in the same epoch as text. So each value must have the same text in the old type and in the new one.
A counterexample is a `real` column that became `double precision`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from typing_extensions import override

from penstock.errors import ConfigError, PenstockError, TargetForeignError
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.ownership import untrusted_schemas
from penstock.postgres.target.ddl import Alteration, lacking_privileges
from penstock.postgres.target.state import (
    OWN_SCHEMA,
    AppliedRecord,
    TargetColumn,
    load_record,
    target_connection,
)
from penstock.postgres.types.registry import BUILTIN_TYPES
from penstock.schema import TableName
from penstock.sinks.base import Target, Targets
from penstock.sinks.evolution import Evolution
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Mode
from penstock.sinks.postgres.rows import source_columns, target_column

_LONGEST_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class Naming:
    """Maps source tables to tables of the target. The table name stays the same. The schema is the one that
    `schemas` has for the source's schema; otherwise its name is `prefix`, followed by the name of the
    source's schema.
    """

    schemas: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    shadow: str | None = None
    """Name of a resync copy. If it is set, `place` returns the shadow table of this copy, whatever the source
    table.
    """

    def place(self, table: TableName) -> TableName:
        if self.shadow is not None:
            return TableName(OWN_SCHEMA, f"shadow_{self.shadow}")
        schema = self.schemas.get(table.schema, self.prefix + table.schema)
        if schema == OWN_SCHEMA:
            raise ConfigError(
                f"{table} would be written to schema {OWN_SCHEMA} of the target, which is reserved for "
                "Penstock",
                hint=f"choose another schema under sink.postgres: `schemas: {{{table.schema}: "
                f"copied_{table.schema}}}`",
            )
        if len(schema.encode()) > _LONGEST_NAME_BYTES:
            raise ConfigError(
                f"the name of schema {schema} is longer than Postgres allows",
                hint="shorten sink.postgres.schema_prefix",
            )
        return TableName(schema, table.name)


class PostgresTargets(Targets):
    """The tables of one pipeline in the database at `address`."""

    def __init__(self, address: SourceAddress, pipeline: str, naming: Naming) -> None:
        self._address = address
        self._pipeline = pipeline
        self._naming = naming

    def place(self, table: TableName) -> TableName:
        return self._naming.place(table)

    @override
    def describe(self, table: TableName) -> str:
        return f"table {self.place(table)} of {self._address.describe()}"

    @override
    def are_distinct(self, one: TableName, other: TableName) -> bool:
        return self.place(one) != self.place(other)

    @override
    def load_target(self, table: TableName) -> Target | None:
        record = self.find_record(table)
        if record is None:
            return None
        origin = None if record.origin is None else Origin.parse(record.origin)
        columns, mode = source_columns(record.columns), Mode(record.mode)
        return Target(
            table, record.source_oid, record.key, columns, record.position, mode, origin, record.copy
        )

    @override
    def find_problems(self, tables: Collection[TableName]) -> list[PenstockError]:
        with self._connected(f"reading {self._address.describe()}") as connection:
            places = [self.place(table) for table in tables]
            return [
                *lacking_privileges(connection, places),
                *untrusted_schemas(connection, {place.schema for place in places}),
            ]

    def find_record(self, table: TableName) -> AppliedRecord | None:
        """The target's record of the table; None if there is none. Raises if another pipeline wrote it."""
        with self._connected(f"reading {self.describe(table)}") as connection:
            record, is_there = load_record(connection, self.place(table))
        if record is None and not is_there:
            return None
        if (
            record is None
            or record.pipeline != self._pipeline
            or record.source != table
            or record.is_replaced
        ):
            raise TargetForeignError(
                f"{self.describe(table)} was written by {_writer(record, self._pipeline)}",
                hint="choose another schema under sink.postgres, or drop that table",
            )
        # If the table has a position and does not exist, it was dropped, so its record is void.
        return record if is_there or record.position is None else None

    def _connected(self, doing: str) -> AbstractContextManager[Connection]:
        """Return a connection for reading."""
        return target_connection(self._address, doing)


def _writer(record: AppliedRecord | None, pipeline: str) -> str:
    if record is None or record.is_replaced:
        return "something that is not Penstock"
    return (
        f"pipeline {record.pipeline!r}"
        if record.pipeline != pipeline
        else f"this pipeline, as the copy of {record.source}"
    )


_WRITTEN_ALIKE = tuple(
    frozenset(BUILTIN_TYPES[name][0] for name in kind)
    for kind in (("int2", "int4", "int8"), ("text", "varchar"))
)


def evolved_record(record: AppliedRecord, evolution: Evolution) -> AppliedRecord:
    """The record after a schema change. Dropped columns keep their types."""
    known = {evolution.renamed.get(column.name, column.name): column for column in record.columns}
    held = _held(evolution.origin)
    columns = tuple(held.get(name) or replace(known[name], name=name) for name in evolution.columns.names)
    return replace(record, columns=columns, key=evolution.key, origin=str(evolution.origin))


def _held(origin: Origin) -> dict[str, TargetColumn]:
    columns = [column for column in origin.columns.values() if column.target is not None]
    return {
        str(each.target): target_column(str(each.target), each.type_oid, each.type_modifier)
        for each in columns
    }


def plan_alteration(record: AppliedRecord, evolution: Evolution) -> Alteration:
    """Plan how `evolution` changes the columns of the target table that `record` describes."""
    columns = {column.name: column for column in evolved_record(record, evolution).columns}
    kept = [
        replace(column, name=evolution.renamed.get(column.name, column.name)) for column in record.columns
    ]
    return Alteration(
        dict(evolution.renamed),
        tuple(columns[column.name] for column in kept if columns[column.name] != column),
        tuple(columns[added.name] for added in evolution.added),
        tuple(added.fill.as_py() for added in evolution.added),
    )


def has_equal_texts(record: AppliedRecord, evolution: Evolution) -> bool:
    """Whether every value of an earlier schema version has the same text in the new types."""
    columns = {column.name: column for column in evolved_record(record, evolution).columns}
    return all(
        _is_alike(column.type_oid, columns[target].type_oid)
        for version, view in evolution.views.items()
        for column in version.columns
        if (target := view.names.get(column.name)) is not None
    )


def _is_alike(before: int, after: int) -> bool:
    """Whether values have the same text in both types. Types that are not built in are text in the target,
    with OID 0.
    """
    return before == after or not after or any(before in kind and after in kind for kind in _WRITTEN_ALIKE)
