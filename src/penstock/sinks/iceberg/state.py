"""How an Iceberg table stands: whose it is, what it was made from, how far it is.

The position is in the summary of the very snapshot that brought the rows. Snapshots that others add on top, by compaction, have none: the
nearest ancestor that has one counts. So a table that was rolled back says what it holds, and not what it once held. Ancestors expire, and
with them what they say; therefore each of our commits writes the position as a property of the table too, with the snapshot that it is of.
That property counts only where the ancestors end in that very snapshot: nothing else shows that the table was not rolled back since.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import TargetForeignError
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Target
from penstock.sinks.layout import Layout, Mode
from penstock.sinks.origin import Origin
from penstock.spool.arrow_text import parse_type, type_text

OWNER = "penstock.pipeline"
KEY = "penstock.key"
SOURCE_OID = "penstock.source_oid"
COLUMNS = "penstock.columns"
MODE = "penstock.mode"
ORIGIN = "penstock.origin"
COPY = "penstock.copy"
POSITION = "penstock.position"
SNAPSHOT = "penstock.snapshot"
"""The snapshot that `POSITION` is of."""
PROPERTIES = (OWNER, KEY, SOURCE_OID, COLUMNS, MODE, ORIGIN, COPY, POSITION, SNAPSHOT)


@dataclass(frozen=True, slots=True)
class SnapshotMark:
    """What counts of one snapshot of the table."""

    id: int
    parent: int | None
    position: Position | None
    """None: not a commit of ours."""


def position_properties(position: Position, snapshot: int) -> dict[str, str]:
    return {POSITION: str(position), SNAPSHOT: str(snapshot)}


def identity_properties(pipeline: str, layout: Layout, source_oid: int, origin: Origin | None) -> dict[str, str]:
    """What a table says of itself. Its columns have types here that Iceberg does not tell apart."""
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
    """How far the table is. `ancestors`: its current snapshot and those before it, newest first, as far as they are still there."""
    parent: int | None = None
    for mark in ancestors:
        if mark.position is not None:
            return mark.position if mark.position > Position.ZERO else None
        parent = mark.parent
    if parent is None or POSITION not in properties or properties.get(SNAPSHOT) != str(parent):
        return None
    position = Position.parse(properties[POSITION])
    return position if position > Position.ZERO else None


def find_version(ancestors: Iterable[SnapshotMark], properties: Mapping[str, str], position: Position) -> int | None:
    """The newest snapshot that holds nothing of ours beyond `position`; None if there is none any more.

    What others committed after our commit up to there belongs to it: compaction, or a change behind our back.
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


def owned_target(table: TableName, place: str, pipeline: str, properties: Mapping[str, str], applied: Position | None) -> Target:
    """What this pipeline did not write is refused."""
    owner = properties.get(OWNER)
    if owner != pipeline:
        written_by = f"pipeline {owner!r}" if owner else "something that is not Penstock"
        raise TargetForeignError(
            f"the Iceberg table {place} was written by {written_by}",
            hint="choose another namespace under sink.iceberg, or drop that table",
        )
    columns = pa.schema([pa.field(name, parse_type(text)) for name, text in json.loads(properties[COLUMNS])])
    key, mode = tuple(json.loads(properties[KEY])), Mode(properties.get(MODE, Mode.MIRROR.value))
    origin = Origin.parse(properties[ORIGIN]) if properties.get(ORIGIN) else None
    return Target(table, int(properties[SOURCE_OID]), key, columns, applied, mode, origin, properties.get(COPY) or None)


# --- the metadata of a table in a Hadoop catalog, read without Spark -----------------------------------------------------------


def load_metadata(directory: Path) -> dict[str, Any] | None:
    """The newest metadata of the table in `directory`; None if there is none. Who commits meanwhile only makes it a little older."""
    found = {_version(path): path for path in (directory / "metadata").glob("v*.metadata.json")}
    while found:
        newest = max(found)
        try:
            document: dict[str, Any] = json.loads(found[newest].read_bytes())
        except FileNotFoundError:
            del found[newest]
        else:
            return document
    return None


def _version(path: Path) -> int:
    digits = path.name.removeprefix("v").removesuffix(".metadata.json")
    return int(digits) if digits.isdigit() else -1


def ancestors_of(metadata: Mapping[str, Any]) -> Iterator[SnapshotMark]:
    """The current snapshot and those before it, newest first."""
    snapshots = {each["snapshot-id"]: each for each in metadata.get("snapshots", ())}
    number: int | None = metadata.get("current-snapshot-id")
    while number is not None and number in snapshots:
        found = snapshots[number]
        text = found.get("summary", {}).get(POSITION)
        position = None if text is None else Position.parse(text)
        parent = found.get("parent-snapshot-id")
        yield SnapshotMark(number, parent, position)
        number = parent
