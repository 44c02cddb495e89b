"""Iceberg tables as they stand, looked at without Spark: in a Hadoop catalog, whose tables are directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from penstock.schema import TableName
from penstock.sinks.base import Target, Targets
from penstock.sinks.directories import directory_name, tells_case_apart
from penstock.sinks.iceberg.state import ancestors_of, find_applied, load_metadata, owned_target


def identifier(namespace: Sequence[str], table: TableName) -> tuple[str, ...]:
    """The table's name in the catalog, level by level. Catalogs make directories of names, so they are written as those of directories."""
    return (*namespace, directory_name(table.schema), directory_name(table.name))


class HadoopTargets(Targets):
    """The tables that one pipeline has in the warehouse of a Hadoop catalog."""

    def __init__(self, warehouse: Path, namespace: Sequence[str], pipeline: str) -> None:
        self._warehouse = warehouse
        self._namespace = tuple(namespace)
        self._pipeline = pipeline

    def path(self, table: TableName) -> Path:
        return self._warehouse.joinpath(*identifier(self._namespace, table))

    @override
    def describe(self, table: TableName) -> str:
        return str(self.path(table))

    @override
    def tells_apart(self, one: TableName, other: TableName) -> bool:
        return tells_case_apart(self._warehouse)

    @override
    def load_target(self, table: TableName) -> Target | None:
        metadata = load_metadata(self.path(table))
        if metadata is None:
            return None
        properties = metadata.get("properties", {})
        applied = find_applied(ancestors_of(metadata), properties)
        return owned_target(table, self.describe(table), self._pipeline, properties, applied)
