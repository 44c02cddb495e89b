"""Definition of Iceberg tables: columns and properties of a new table, the place of its files, and checks of
an existing table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from penstock.errors import SchemaChangedError, TargetForeignError
from penstock.position import Position
from penstock.schema import TableSchema
from penstock.sinks.base import SnapshotPlace, Target
from penstock.sinks.dataframes import quoted, sql_type, text_literal
from penstock.sinks.iceberg.catalog import LoadedTable
from penstock.sinks.iceberg.maintenance import KEPT_SNAPSHOTS, Maintenance
from penstock.sinks.iceberg.schema import stored_name, stored_type
from penstock.sinks.modes import Layout, Mode

_METADATA_VERSIONS = 100


@dataclass(frozen=True, slots=True)
class IcebergPlace:
    """The catalog, namespace and warehouse of a pipeline's tables."""

    catalog: str
    warehouse: Path
    namespace: tuple[str, ...] = ()
    format_version: int = 2
    maintenance: Maintenance = field(default_factory=Maintenance)


def layout_of(schema: TableSchema, mode: Mode) -> Layout:
    return Layout(
        pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns]), schema.key, mode
    )


def target_layout(target: Target) -> Layout:
    return Layout(target.schema, target.key, target.mode)


def definition(layout: Layout, properties: Mapping[str, str]) -> str:
    """The part of a CREATE TABLE statement after the table name."""
    columns = [
        f"{quoted(stored_name(field.name, layout.mode))} {sql_type(field.type)}" for field in layout.schema
    ]
    listed = [f"{text_literal(name)} = {text_literal(value)}" for name, value in properties.items()]
    return f"({', '.join(columns)}) USING iceberg TBLPROPERTIES ({', '.join(listed)})"


def table_properties(
    place: IcebergPlace, former: LoadedTable | None, identity: Mapping[str, str]
) -> dict[str, str]:
    """The properties of a new table. Its format version is at least that of `former`, the table that it
    replaces.
    """
    version = place.format_version if former is None else max(place.format_version, former.format_version)
    return {
        **identity,
        "format-version": str(version),
        "write.metadata.delete-after-commit.enabled": "true",
        "write.metadata.previous-versions-max": str(_METADATA_VERSIONS),
        # A rewrite that conflicts with epochs must be able to commit between two epochs.
        "commit.retry.num-retries": "20",
        "commit.retry.min-wait-ms": "20",
        "commit.retry.max-wait-ms": "500",
        # Snapshot expiry by other programs must keep the snapshots whose summary has the position.
        "history.expire.min-snapshots-to-keep": str(KEPT_SNAPSHOTS),
    }


def files_place(loaded: LoadedTable, prefix: str) -> SnapshotPlace:
    return SnapshotPlace(str(loaded.directory), loaded.schema, prefix)


def snapshot_place(loaded: LoadedTable, layout: Layout, fence: Position) -> SnapshotPlace:
    """The place for the files of a snapshot that is exact at `fence`."""
    values = layout.mode.snapshot_values(fence, datetime.now(UTC))
    constants = tuple((name, _plain(value)) for name, value in values.items())
    return SnapshotPlace(str(loaded.directory), loaded.schema, f"snapshot-{fence.value:016X}", constants)


def _plain(value: object) -> str | int | bool | None:
    if value is None or isinstance(value, (str, int)):
        return value
    assert isinstance(value, datetime)
    return value.isoformat()


def check_unchanged(target: Target, found: Target, place: str) -> None:
    """Raise an error if another run has applied a schema change that this run does not know."""
    if (target.schema, target.key, target.source_oid, target.mode) != (
        found.schema,
        found.key,
        found.source_oid,
        found.mode,
    ):
        raise SchemaChangedError(
            f"{place} has other columns, or another source table, than this run expects: another run or "
            "program changed it",
            hint=f"penstock tables resync CONFIG {target.table}, or drop {place} and restart the pipeline to "
            "copy the table again",
        )


def check_columns(target: Target, loaded: LoadedTable, place: str) -> None:
    """Raise `SchemaChangedError` if the table lacks a recorded column. If another program has renamed the
    column, writing to the table would lose the column's values.
    """
    lacking = [name for name in target_layout(target).schema.names if name not in loaded.schema.names]
    if lacking:
        raise SchemaChangedError(
            f"{place} no longer has the column {lacking[0]}",
            hint=f"restore the name of the column, or drop {place} and restart the pipeline to copy the "
            "table again",
        )


def check_adoptable(loaded: LoadedTable, layout: Layout, place: str) -> None:
    """Raise unless a copy of the source would have all columns of the table, with the same types, so that
    readers of the table lose no column.
    """
    if loaded.problem is not None:
        raise TargetForeignError(
            f"{place} cannot be adopted: {loaded.problem.message}", hint="set existing: replace"
        )
    wanted = {
        name: stored_type(field.type)
        for field in layout.schema
        for name in (field.name, stored_name(field.name, layout.mode))
    }
    for present in loaded.schema:
        if wanted.get(present.name) != present.type:
            known = wanted.get(present.name)
            why = (
                "is not a column of the source"
                if known is None
                else f"is {present.type}, and would become {known}"
            )
            raise TargetForeignError(
                f"{place} cannot be adopted: its column {present.name!r} {why}",
                hint="alter the column there, or set existing: replace",
            )
