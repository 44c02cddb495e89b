"""How an Iceberg table of ours is made: its columns, its properties, and what a snapshot's files look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.base import SnapshotPlace, Target
from penstock.sinks.iceberg.catalog import LoadedTable
from penstock.sinks.iceberg.maintenance import KEPT_SNAPSHOTS, Maintenance
from penstock.sinks.iceberg.names import stored_name
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.names import quoted, sql_type, text_literal

_METADATA_VERSIONS = 100


@dataclass(frozen=True, slots=True)
class IcebergPlace:
    """Which catalog the tables are in, under which namespaces, and where it keeps them."""

    catalog: str
    warehouse: Path
    namespace: tuple[str, ...] = ()
    format_version: int = 2
    maintenance: Maintenance = field(default_factory=Maintenance)


def layout_of(schema: TableSchema, mode: Mode) -> Layout:
    return Layout(pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns]), schema.key, mode)


def target_layout(target: Target) -> Layout:
    return Layout(target.schema, target.key, target.mode)


def definition(layout: Layout, properties: Mapping[str, str]) -> str:
    """What stands behind the table's name in CREATE TABLE."""
    columns = [f"{quoted(stored_name(field.name, layout.mode))} {sql_type(field.type)}" for field in layout.schema]
    listed = [f"{text_literal(name)} = {text_literal(value)}" for name, value in properties.items()]
    return f"({', '.join(columns)}) USING iceberg TBLPROPERTIES ({', '.join(listed)})"


def table_properties(place: IcebergPlace, former: LoadedTable | None, identity: Mapping[str, str]) -> dict[str, str]:
    """`former`: the table whose place it takes, which may be of a later format, and never goes back."""
    version = place.format_version if former is None else max(place.format_version, former.format_version)
    return {
        **identity,
        "format-version": str(version),
        "write.metadata.delete-after-commit.enabled": "true",
        "write.metadata.previous-versions-max": str(_METADATA_VERSIONS),
        # A rewrite that meets epochs commits between two of them.
        "commit.retry.num-retries": "20",
        "commit.retry.min-wait-ms": "20",
        "commit.retry.max-wait-ms": "500",
        # Whoever expires snapshots leaves those by which the position is known.
        "history.expire.min-snapshots-to-keep": str(KEPT_SNAPSHOTS),
    }


def files_place(loaded: LoadedTable, prefix: str) -> SnapshotPlace:
    return SnapshotPlace(str(loaded.directory), loaded.schema, prefix)


def snapshot_place(loaded: LoadedTable, layout: Layout, fence: Position) -> SnapshotPlace:
    """Where and how a snapshot that is exact at `fence` is written."""
    values = layout.snapshot_values(fence, datetime.now(UTC))
    constants = tuple((name, _plain(value)) for name, value in values.items())
    return SnapshotPlace(str(loaded.directory), loaded.schema, f"snapshot-{fence.value:016X}", constants)


def _plain(value: object) -> str | int | bool | None:
    if value is None or isinstance(value, (str, int)):
        return value
    assert isinstance(value, datetime)
    return value.isoformat()
