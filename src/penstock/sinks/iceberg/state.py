"""State of an Iceberg table: owner, source columns and applied position. `HadoopTargets` reads it from a
Hadoop catalog without Spark.

The position is in the summary of the snapshot that added the rows. Snapshots that other programs add, for
example by compaction, have no position, so the nearest ancestor with a position counts. Thus a table that was
rolled back reports the position of its current content.

Since ancestors expire, each commit of Penstock also stores the position and the id of its snapshot as table
properties. These count only if the oldest existing ancestor is a child of exactly that snapshot. Otherwise
the table may have been rolled back after the commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

from penstock import storage
from penstock.arrow import parse_type, type_text
from penstock.errors import TargetForeignError
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Target, Targets, directory_name
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Layout, Mode
from penstock.storage.temporary import is_case_sensitive

OWNER = "penstock.pipeline"
KEY = "penstock.key"
SOURCE_OID = "penstock.source_oid"
COLUMNS = "penstock.columns"
MODE = "penstock.mode"
ORIGIN = "penstock.origin"
COPY = "penstock.copy"
POSITION = "penstock.position"
SNAPSHOT = "penstock.snapshot"
"""The snapshot to which `POSITION` belongs."""
PROPERTIES = (OWNER, KEY, SOURCE_OID, COLUMNS, MODE, ORIGIN, COPY, POSITION, SNAPSHOT)


@dataclass(frozen=True, slots=True)
class SnapshotMark:
    """The id, parent and position of one snapshot."""

    id: int
    parent: int | None
    position: Position | None
    """None if this pipeline did not commit the snapshot."""


def position_properties(position: Position, snapshot: int) -> dict[str, str]:
    return {POSITION: str(position), SNAPSHOT: str(snapshot)}


def identity_properties(
    pipeline: str, layout: Layout, source_oid: int, origin: Origin | None
) -> dict[str, str]:
    """Properties that identify the target. They include the columns' Arrow types, because Iceberg does not
    distinguish all of them.
    """
    listed = [[field.name, type_text(field.type)] for field in layout.columns]
    return {
        OWNER: pipeline,
        KEY: json.dumps(list(layout.key)),
        SOURCE_OID: str(source_oid),
        COLUMNS: json.dumps(listed),
        MODE: layout.mode.value,
        ORIGIN: "" if origin is None else str(origin),
    }


def find_applied(ancestors: Iterable[SnapshotMark], properties: Mapping[str, str]) -> Position | None:
    """The applied position; None if the table has none. `ancestors`: the current snapshot and its existing
    ancestors, newest first.
    """
    parent: int | None = None
    for mark in ancestors:
        if mark.position is not None:
            return mark.position if mark.position > Position.ZERO else None
        parent = mark.parent
    if parent is None or POSITION not in properties or properties.get(SNAPSHOT) != str(parent):
        return None
    position = Position.parse(properties[POSITION])
    return position if position > Position.ZERO else None


def find_version(
    ancestors: Iterable[SnapshotMark], properties: Mapping[str, str], position: Position
) -> int | None:
    """The id of the newest snapshot in which the pipeline has applied no change after `position`; None if
    that snapshot no longer exists.

    This may be a snapshot that another program added between two commits of the pipeline, for example by
    compaction.
    """
    marks = list(ancestors)
    version: int | None = None
    for mark in marks:
        version = mark.id if version is None else version
        if mark.position is not None:
            if Position.ZERO < mark.position <= position:
                return version
            version = None
    held = find_applied(marks, properties) if version is not None else None
    return version if held is not None and held <= position else None


def owned_target(
    table: TableName, place: str, pipeline: str, properties: Mapping[str, str], applied: Position | None
) -> Target:
    """Return the state of a target table. Raises `TargetForeignError` if this pipeline did not write it."""
    owner = properties.get(OWNER)
    if owner != pipeline:
        written_by = f"pipeline {owner!r}" if owner else "something that is not Penstock"
        raise TargetForeignError(
            f"the Iceberg table {place} was written by {written_by}",
            hint="choose another namespace under sink.iceberg, or drop that table",
        )
    columns = pa.schema([pa.field(name, parse_type(text)) for name, text in json.loads(properties[COLUMNS])])
    key, mode = tuple(json.loads(properties[KEY])), Mode.parse(properties.get(MODE))
    origin = Origin.parse(properties[ORIGIN]) if properties.get(ORIGIN) else None
    return Target(
        table, int(properties[SOURCE_OID]), key, columns, applied, mode, origin, properties.get(COPY) or None
    )


# --- the metadata of a table in a Hadoop catalog, read without Spark ----------------------------------------


def load_metadata(directory: Path) -> dict[str, Any] | None:
    """Load the newest metadata of the table in `directory`; None if there is none. During a commit by another
    process, it may be the metadata before that commit.
    """
    found = {_version(path): path for path in storage.list_paths(directory / "metadata", "v*.metadata.json")}
    while found:
        newest = max(found)
        data = storage.read(found[newest])
        if data is not None:
            document: dict[str, Any] = json.loads(data)
            return document
        del found[newest]
    return None


def _version(path: Path) -> int:
    digits = path.name.removeprefix("v").removesuffix(".metadata.json")
    return int(digits) if digits.isdigit() else -1


def ancestors_of(metadata: Mapping[str, Any]) -> Iterator[SnapshotMark]:
    """Yield the current snapshot and its existing ancestors, newest first."""
    snapshots = {each["snapshot-id"]: each for each in metadata.get("snapshots", ())}
    number: int | None = metadata.get("current-snapshot-id")
    while number is not None and number in snapshots:
        found = snapshots[number]
        text = found.get("summary", {}).get(POSITION)
        position = None if text is None else Position.parse(text)
        parent = found.get("parent-snapshot-id")
        yield SnapshotMark(number, parent, position)
        number = parent


def identifier(namespace: Sequence[str], table: TableName) -> tuple[str, ...]:
    """The table's name in the catalog, level by level. Catalogs turn names into directories, so names are
    escaped like directory names.
    """
    return (*namespace, directory_name(table.schema), directory_name(table.name))


class HadoopTargets(Targets):
    """The tables of one pipeline in the warehouse of a Hadoop catalog."""

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
    def are_distinct(self, one: TableName, other: TableName) -> bool:
        return is_case_sensitive(self._warehouse)

    @override
    def load_target(self, table: TableName) -> Target | None:
        metadata = load_metadata(self.path(table))
        if metadata is None:
            return None
        properties = metadata.get("properties", {})
        applied = find_applied(ancestors_of(metadata), properties)
        return owned_target(table, self.describe(table), self._pipeline, properties, applied)
