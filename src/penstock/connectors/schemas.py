"""The shapes of captured tables, now and earlier: from the catalog as of `open`, and from the spool's history after that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.change import change_schema
from penstock.connectors.progress import Offset
from penstock.contracts.schemas import SchemaProvider
from penstock.errors import ConnectorError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.spool.history import SchemaHistory


class CapturedSchemas(SchemaProvider):
    """What the catalog said of each table, and at which position; later shapes are those that the log brought."""

    def __init__(self, spool: Path, declared: Mapping[TableName, TableSchema], seen_at: Position) -> None:
        self._spool = spool
        self._declared = dict(declared)
        self._seen_at = seen_at

    @override
    def partitions(self) -> tuple[str, ...]:
        return tuple(sorted(str(name) for name in {*self._declared, *self._recorded()}))

    @override
    def schema_of(self, partition: str, offset: str | None = None) -> pa.Schema | None:
        """At an offset before the first that is known of the table, None: the catalog of now does not say what it was."""
        try:
            table = TableName.parse(partition)
            position = None if offset is None else Offset.parse(offset).position
        except ValueError as error:
            raise ConnectorError(
                f"not a table, or not an offset of its stream: {error}", hint="name a partition of a batch, and an offset of a checkpoint"
            ) from error
        schema = self.table_schema(table, position)
        return None if schema is None else change_schema(schema)

    def table_schema(self, table: TableName, position: Position | None = None) -> TableSchema | None:
        declared = [(self._seen_at, self._declared[table])] if table in self._declared else []
        # At one position the log knows better than the catalog: it comes last there, since the sort keeps that order.
        versions = sorted([*declared, *self._recorded().get(table, ())], key=lambda version: version[0])
        fitting = [schema for at, schema in versions if position is None or at <= position]
        return fitting[-1] if fitting else None

    def _recorded(self) -> dict[TableName, list[tuple[Position, TableSchema]]]:
        """By the name that the table had. After a re-creation, tables with several OIDs have had one name."""
        found: dict[TableName, list[tuple[Position, TableSchema]]] = {}
        for versions in SchemaHistory.load(self._spool).tables.values():
            for version in versions:
                found.setdefault(version.schema.name, []).append((version.position, version.schema))
        return found
