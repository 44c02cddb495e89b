"""Tables of a Postgres target as they stand, looked at without Spark: where each one is, and how far."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from typing_extensions import override

from penstock.errors import ConfigError, PenstockError, TargetForeignError
from penstock.postgres.applied import OWN_SCHEMA, AppliedRecord, load_record, target_connection
from penstock.postgres.connection import Connection, SourceAddress
from penstock.postgres.ownership import untrusted_schemas
from penstock.postgres.target_privileges import lacking_privileges
from penstock.schema import TableName
from penstock.sinks.base import Target, Targets
from penstock.sinks.layout import Mode
from penstock.sinks.origin import Origin
from penstock.sinks.postgres.rows import source_columns

_LONGEST_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class Naming:
    """Where tables go: into the schema that stands for their own, or one of the same name behind a prefix."""

    schemas: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    shadow: str | None = None
    """A name for the one table that is copied to take another's place."""

    def place(self, table: TableName) -> TableName:
        if self.shadow is not None:
            return TableName(OWN_SCHEMA, f"shadow_{self.shadow}")
        schema = self.schemas.get(table.schema, self.prefix + table.schema)
        if schema == OWN_SCHEMA:
            raise ConfigError(
                f"{table} would go to the schema {OWN_SCHEMA} of the target, which is where positions are kept",
                hint=f"name another one for it, under sink.postgres: `schemas: {{{table.schema}: copied_{table.schema}}}`",
            )
        if len(schema.encode()) > _LONGEST_NAME_BYTES:
            raise ConfigError(f"the name of schema {schema} is longer than Postgres allows", hint="shorten sink.postgres.schema_prefix")
        return TableName(schema, table.name)


class PostgresTargets(Targets):
    """The tables that one pipeline has in the database at `address`."""

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
    def tells_apart(self, one: TableName, other: TableName) -> bool:
        return self.place(one) != self.place(other)

    @override
    def load_target(self, table: TableName) -> Target | None:
        record = self.find_record(table)
        if record is None:
            return None
        origin = None if record.origin is None else Origin.parse(record.origin)
        columns, mode = source_columns(record.columns), Mode(record.mode)
        return Target(table, record.source_oid, record.key, columns, record.position, mode, origin, record.copy)

    @override
    def find_problems(self, tables: Collection[TableName]) -> list[PenstockError]:
        with self._connected(f"looking at {self._address.describe()}") as connection:
            places = [self.place(table) for table in tables]
            return [*lacking_privileges(connection, places), *untrusted_schemas(connection, {place.schema for place in places})]

    def find_record(self, table: TableName) -> AppliedRecord | None:
        """What the target knows of the table; None if there is nothing. What this pipeline did not copy from there is refused."""
        with self._connected(f"looking at {self.describe(table)}") as connection:
            record, is_there = load_record(connection, self.place(table))
        if record is None and not is_there:
            return None
        if record is None or record.pipeline != self._pipeline or record.source != table or record.is_replaced:
            raise TargetForeignError(
                f"{self.describe(table)} was written by {_writer(record, self._pipeline)}",
                hint="choose another schema under sink.postgres, or drop that table",
            )
        # Dropped by somebody: what is known of it is known of nothing.
        return record if is_there or record.position is None else None

    def _connected(self, doing: str) -> AbstractContextManager[Connection]:
        """A connection to look around with."""
        return target_connection(self._address, doing)


def _writer(record: AppliedRecord | None, pipeline: str) -> str:
    if record is None or record.is_replaced:
        return "something that is not Penstock"
    return f"pipeline {record.pipeline!r}" if record.pipeline != pipeline else f"this pipeline, as the copy of {record.source}"
