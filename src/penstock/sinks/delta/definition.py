"""Definition of Delta tables: CREATE TABLE, properties, the place for snapshot files, and changes of columns.

A change of columns is committed together with the rows that need it. With column mapping, files have physical
column names that never change, so a rename changes only the log. An added column is null in existing files.
If the column has another default value, or if a column gets a wider type, the existing files are rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from penstock.errors import TargetForeignError
from penstock.position import Position
from penstock.sinks.base import SnapshotPlace
from penstock.sinks.dataframes import quoted, sql_type, text_literal
from penstock.sinks.delta.log import KEY, MODE, ORIGIN, OWNER, SOURCE_OID, load_summary
from penstock.sinks.delta.state import (
    FIELD_ID,
    PHYSICAL_NAME,
    DeltaState,
    Metadata,
    Unsupported,
    file_schema,
    table_schema,
    type_document,
)
from penstock.sinks.evolution import Evolution
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Layout, Mode


def definition(path: Path, layout: Layout, properties: Mapping[str, str]) -> str:
    """The part of a CREATE TABLE or REPLACE TABLE statement that follows these words."""
    columns = [f"{quoted(field.name)} {sql_type(field.type)}" for field in layout.schema]
    return (
        f"delta.{quoted(str(path))} ({', '.join(columns)}) USING delta TBLPROPERTIES ({listed(properties)})"
    )


def table_properties(pipeline: str, layout: Layout, source_oid: int, origin: Origin | None) -> dict[str, str]:
    """The properties of a new table. They enable column mapping, so that a rename changes only the log."""
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
    """The properties that make the pipeline the owner of an existing table. Features of the table stay as
    they are.
    """
    properties = table_properties(pipeline, layout, source_oid, None)
    return {name: properties[name] for name in (OWNER, KEY, SOURCE_OID, MODE, ORIGIN)}


def check_adoptable(path: Path, layout: Layout) -> None:
    """Raise unless a copy of the source would have all columns of the table, with the same types, so that
    readers of the table lose no column.
    """
    summary = load_summary(path)
    found = pa.schema([]) if summary is None else table_schema(summary.metadata)
    wanted = {field.name: field.type for field in layout.schema}
    for field in found:
        if wanted.get(field.name) != field.type:
            known = wanted.get(field.name)
            why = (
                "is not a column of the source"
                if known is None
                else f"is {field.type}, and would become {known}"
            )
            raise TargetForeignError(
                f"{path} cannot be adopted: its column {field.name!r} {why}",
                hint="alter the column there, or set existing: replace",
            )


def is_unchanged(metadata: Metadata, layout: Layout, source_oid: int) -> bool:
    """Whether the table still has the same source table, key and mode, and all columns of `layout`. It may
    have more columns.
    """
    known = {name: metadata.properties.get(name) for name in (KEY, SOURCE_OID, MODE)}
    expected = {
        KEY: json.dumps(list(layout.key)),
        SOURCE_OID: str(source_oid),
        MODE: known[MODE] and layout.mode.value,
    }
    found = {field.name: field.type for field in table_schema(metadata)}
    return known == expected and all(found.get(field.name) == field.type for field in layout.schema)


def listed(properties: Mapping[str, str]) -> str:
    return ", ".join(f"{text_literal(name)} = {text_literal(value)}" for name, value in properties.items())


def snapshot_place(path: Path, layout: Layout, fence: Position) -> SnapshotPlace | None:
    """The place for the files of a snapshot that is exact at `fence`; None if the table does not exist or
    lacks a column.
    """
    summary = load_summary(path)
    names = [] if summary is None else table_schema(summary.metadata).names
    if summary is None or not set(layout.schema.names) <= set(names):
        return None
    found = file_schema(summary.metadata)
    fields = {name: found.field(names.index(name)) for name in layout.schema.names}
    values = layout.mode.snapshot_values(fence, datetime.now(UTC))
    constants = tuple((fields[name].name, _plain(value)) for name, value in values.items())
    return SnapshotPlace(
        str(path), pa.schema(list(fields.values())), f"snapshot-{fence.value:016X}", constants
    )


def _plain(value: object) -> str | int | bool | None:
    if value is None or isinstance(value, (str, int)):
        return value
    assert isinstance(value, datetime)
    return value.isoformat()


_MODE = "delta.columnMapping.mode"
_MAX_ID = "delta.columnMapping.maxColumnId"
_LOCAL_TIMES = "timestampNtz"


@dataclass(frozen=True)
class EvolvedState:
    """A state with changed columns that is not committed yet."""

    state: DeltaState
    actions: tuple[dict[str, Any], ...]
    fills: Mapping[str, pa.Scalar]
    """The default values of added columns for existing rows. Columns whose default value is NULL are not
    included.
    """
    is_rewritten: bool
    """Whether the existing files have to be rewritten."""


def evolve_state(
    state: DeltaState, evolution: Evolution, mode: Mode, properties: Mapping[str, str]
) -> EvolvedState:
    """Change the columns of a state as `evolution` plans, and set `properties`. Raises `Unsupported` if a
    commit to the log cannot make the change.
    """
    is_mapped = state.metadata.properties.get(_MODE, "none") == "name"
    if evolution.renamed and not is_mapped:
        raise Unsupported("its columns are not mapped, so they cannot be renamed")
    numbers = _Numbers(int(state.metadata.properties.get(_MAX_ID, "0"))) if is_mapped else None
    metadata = _evolved(state.metadata, evolution, mode, dict(properties), numbers)
    actions: list[dict[str, Any]] = []
    protocol = state.protocol
    if any(_holds_local_times(added.arrow_type) for added in evolution.added) and _LOCAL_TIMES not in (
        protocol.get("writerFeatures") or ()
    ):
        protocol = _with_feature(protocol, _LOCAL_TIMES)
        actions.append({"protocol": protocol})
    actions.append({"metaData": metadata.action})
    fills = {added.name: added.fill for added in evolution.added if added.fill.is_valid}
    evolved = replace(state, metadata=metadata, protocol=protocol)
    return EvolvedState(evolved, tuple(actions), fills, bool(fills or evolution.widened))


class _Numbers:
    """Assigns the next column ids of column mapping, also to nested columns."""

    def __init__(self, last: int) -> None:
        self.last = last

    def document(self) -> dict[str, object]:
        self.last += 1
        return {FIELD_ID: self.last, PHYSICAL_NAME: f"col-{uuid4()}"}


def _evolved(
    metadata: Metadata, evolution: Evolution, mode: Mode, properties: dict[str, str], numbers: _Numbers | None
) -> Metadata:
    fields = []
    for found in metadata.fields:
        name = evolution.renamed.get(found["name"], found["name"])
        wider = evolution.widened.get(name)
        fields.append({**found, "name": name, **({} if wider is None else {"type": type_document(wider)})})
    own = [at for at, found in enumerate(metadata.fields) if found["name"] not in mode.added_names]
    document = numbers.document if numbers is not None else dict
    new = [
        {
            "name": added.name,
            "type": type_document(added.arrow_type, document),
            "nullable": True,
            "metadata": document(),
        }
        for added in evolution.added
    ]
    place = own[-1] + 1 if own else 0
    if numbers is not None:
        properties[_MAX_ID] = str(numbers.last)
    return Metadata(
        {
            **metadata.action,
            "schemaString": json.dumps(
                {"type": "struct", "fields": [*fields[:place], *new, *fields[place:]]}
            ),
            "configuration": {**metadata.properties, **properties},
        }
    )


def _with_feature(protocol: Mapping[str, Any], feature: str) -> dict[str, Any]:
    if protocol["minReaderVersion"] < 3 or protocol["minWriterVersion"] < 7:
        raise Unsupported("its protocol has no feature list, and it needs another feature")
    lists = ("readerFeatures", "writerFeatures")
    return {**protocol, **{name: [*(protocol.get(name) or ()), feature] for name in lists}}


def _holds_local_times(arrow_type: pa.DataType) -> bool:
    return any(pa.types.is_timestamp(each) and each.tz is None for each in _inner(arrow_type))


def _inner(arrow_type: pa.DataType) -> Iterator[pa.DataType]:
    yield arrow_type
    for at in range(arrow_type.num_fields):
        yield from _inner(arrow_type.field(at).type)
