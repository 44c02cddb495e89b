"""How a Delta table of ours is made: its columns, its properties, and what a snapshot's files look like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from penstock.errors import TargetForeignError
from penstock.position import Position
from penstock.sinks.base import SnapshotPlace
from penstock.sinks.delta.log import KEY, MODE, ORIGIN, OWNER, SOURCE_OID, open_log
from penstock.sinks.delta.schema import file_schema, table_schema
from penstock.sinks.delta.state import Metadata
from penstock.sinks.layout import Layout
from penstock.sinks.names import quoted, sql_type, text_literal
from penstock.sinks.origin import Origin


def definition(path: Path, layout: Layout, properties: Mapping[str, str]) -> str:
    """What stands behind CREATE TABLE."""
    columns = [f"{quoted(field.name)} {sql_type(field.type)}" for field in layout.schema]
    return f"delta.{quoted(str(path))} ({', '.join(columns)}) USING delta TBLPROPERTIES ({listed(properties)})"


def table_properties(pipeline: str, layout: Layout, source_oid: int, origin: Origin | None) -> dict[str, str]:
    """Columns are mapped, so that a rename is one of the log alone."""
    return {
        OWNER: pipeline,
        KEY: json.dumps(list(layout.key)),
        SOURCE_OID: str(source_oid),
        MODE: layout.mode.value,
        ORIGIN: "" if origin is None else str(origin),
        "delta.enableDeletionVectors": "true",
        "delta.columnMapping.mode": "name",
    }


def ownership(pipeline: str, layout: Layout, source_oid: int) -> dict[str, str]:
    """What makes a table that is there the pipeline's. What it is able to do stays as it is."""
    properties = table_properties(pipeline, layout, source_oid, None)
    return {name: properties[name] for name in (OWNER, KEY, SOURCE_OID, MODE, ORIGIN)}


def check_adoptable(path: Path, layout: Layout) -> None:
    """Whatever the table has, a copy of the source must have too: nobody who reads it is to miss a column, or find another type."""
    log = open_log(path)
    found = pa.schema([]) if log is None else table_schema(Metadata({"schemaString": log.schema().to_json()}))
    wanted = {field.name: field.type for field in layout.schema}
    for field in found:
        if wanted.get(field.name) != field.type:
            known = wanted.get(field.name)
            why = "is none of the source's" if known is None else f"is {field.type}, and would become {known}"
            raise TargetForeignError(
                f"{path} cannot be adopted: its column {field.name!r} {why}",
                hint="alter the column there, or set existing: replace",
            )


def is_as_begun(metadata: Metadata, layout: Layout, source_oid: int) -> bool:
    """Whether the table is still made from the same source, and has all its columns. It may have more."""
    known = {name: metadata.properties.get(name) for name in (KEY, SOURCE_OID, MODE)}
    expected = {KEY: json.dumps(list(layout.key)), SOURCE_OID: str(source_oid), MODE: known[MODE] and layout.mode.value}
    found = {field.name: field.type for field in table_schema(metadata)}
    return known == expected and all(found.get(field.name) == field.type for field in layout.schema)


def listed(properties: Mapping[str, str]) -> str:
    return ", ".join(f"{text_literal(name)} = {text_literal(value)}" for name, value in properties.items())


def snapshot_place(path: Path, layout: Layout, fence: Position) -> SnapshotPlace | None:
    """Where and how a snapshot that is exact at `fence` is written; None if there is no table that has all columns."""
    log = open_log(path)
    metadata = None if log is None else Metadata({"schemaString": log.schema().to_json()})
    names = [] if metadata is None else table_schema(metadata).names
    if metadata is None or not set(layout.schema.names) <= set(names):
        return None
    found = file_schema(metadata)
    fields = {name: found.field(names.index(name)) for name in layout.schema.names}
    values = layout.snapshot_values(fence, datetime.now(UTC))
    constants = tuple((fields[name].name, _plain(value)) for name, value in values.items())
    return SnapshotPlace(str(path), pa.schema(list(fields.values())), f"snapshot-{fence.value:016X}", constants)


def _plain(value: object) -> str | int | bool | None:
    if value is None or isinstance(value, (str, int)):
        return value
    assert isinstance(value, datetime)
    return value.isoformat()
