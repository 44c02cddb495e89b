"""How an Iceberg table stands: whose it is, what it was made from, how far it is.

The position is in the summary of the very snapshot that brought the rows. Snapshots that others add on top, by compaction, have none: the
nearest ancestor that has one counts. So a table that was rolled back says what it holds, and not what it once held. Ancestors expire, and
with them what they say; therefore each of our commits writes the position as a property of the table too, with its sequence number. That
property counts only where the ancestors end in nothing, and only for a table that is not older than it.
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
from penstock.spool.arrow_text import parse_type, type_text

OWNER = "penstock.pipeline"
KEY = "penstock.key"
SOURCE_OID = "penstock.source_oid"
COLUMNS = "penstock.columns"
POSITION = "penstock.position"
SEQUENCE = "penstock.sequence"
PROPERTIES = (OWNER, KEY, SOURCE_OID, COLUMNS, POSITION, SEQUENCE)


@dataclass(frozen=True, slots=True)
class SnapshotMark:
    """What counts of one snapshot of the table."""

    id: int
    sequence: int
    parent: int | None
    position: Position | None
    """None: not a commit of ours."""


def position_properties(position: Position, sequence: int) -> dict[str, str]:
    return {POSITION: str(position), SEQUENCE: str(sequence)}


def identity_properties(pipeline: str, key: Iterable[str], source_oid: int, columns: pa.Schema) -> dict[str, str]:
    """What a table says of itself. Its columns have types here that Iceberg does not tell apart."""
    listed = [[field.name, type_text(field.type)] for field in columns]
    return {OWNER: pipeline, KEY: json.dumps(list(key)), SOURCE_OID: str(source_oid), COLUMNS: json.dumps(listed)}


def find_applied(ancestors: Iterable[SnapshotMark], properties: Mapping[str, str]) -> Position | None:
    """How far the table is. `ancestors`: its current snapshot and those before it, newest first, as far as they are still there."""
    newest: SnapshotMark | None = None
    parent: int | None = None
    for mark in ancestors:
        newest = newest or mark
        if mark.position is not None:
            return mark.position if mark.position > Position.ZERO else None
        parent = mark.parent
    if newest is None or parent is None or POSITION not in properties:
        return None
    position = Position.parse(properties[POSITION])
    return position if position > Position.ZERO and int(properties.get(SEQUENCE, "0")) <= newest.sequence else None


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
    return Target(table, int(properties[SOURCE_OID]), tuple(json.loads(properties[KEY])), columns, applied)


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
        yield SnapshotMark(number, found.get("sequence-number", 0), parent, position)
        number = parent
