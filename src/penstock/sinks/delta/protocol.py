"""What a Delta table asks of whoever writes to it, as far as we know how to keep it.

A table lists the features that a writer must know. Of the ones below some need nothing from rows that are added as files or taken out by
deletion vectors, and the others only matter where a property or a column makes use of them, which ours do not. Anything else is left to
Delta itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.sinks.delta.state import DeltaState, Unsupported

_READER_VERSIONS = range(1, 4)
_WRITER_VERSIONS = range(1, 8)
_SAFE = frozenset({"deletionVectors", "columnMapping", "timestampNtz", "vacuumProtocolCheck", "allowColumnDefaults", "domainMetadata"})
_SAFE_UNUSED = frozenset({"appendOnly", "invariants", "checkConstraints", "generatedColumns", "changeDataFeed", "identityColumns"})
_PROPERTIES = frozenset({"delta.appendOnly", "delta.enableChangeDataFeed", "delta.enableRowTracking"})
_IMPLIED_READER = {2: ("columnMapping",)}
_IMPLIED_WRITER = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}
CONSTRAINT = "delta.constraints."
_NOT_NULL = "NOT NULL"
_COLUMN_METADATA = ("delta.invariants", "delta.generationExpression", "delta.identity.", _NOT_NULL)


def check_writable(state: DeltaState) -> None:
    """Raise `Unsupported` unless files may be added to this table by whoever knows what this package knows."""
    reader, writer = state.protocol["minReaderVersion"], state.protocol["minWriterVersion"]
    if reader not in _READER_VERSIONS or writer not in _WRITER_VERSIONS:
        raise Unsupported(f"it asks for the versions {reader} and {writer} of the protocol")
    asked = {*(state.protocol.get("readerFeatures") or ()), *(state.protocol.get("writerFeatures") or ())}
    if unknown := sorted(asked - _SAFE - _SAFE_UNUSED):
        raise Unsupported(f"it has the feature {unknown[0]}")
    if state.metadata.partitions:
        raise Unsupported("it has partitions")
    properties = state.metadata.properties
    for name, value in properties.items():
        if name.startswith(CONSTRAINT) or (name in _PROPERTIES and value.lower() == "true"):
            raise Unsupported(f"it has the property {name}")
    if properties.get("delta.columnMapping.mode", "none") not in ("none", "name"):
        raise Unsupported("its columns are mapped by number")
    for name in _metadata_names(state.metadata.fields):
        if name.startswith(_COLUMN_METADATA):
            raise Unsupported(f"it has a column with {name}")


def joined_protocol(table: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a table asks for that takes in the files of another one: all that either of them does."""
    features = {kind: [*dict.fromkeys((*_features(table, kind), *_features(other, kind)))] for kind in ("readerFeatures", "writerFeatures")}
    if all(set(found) == set(_features(table, kind)) for kind, found in features.items()):
        return table
    if not set(features["writerFeatures"]) >= set(features["readerFeatures"]):
        raise Unsupported("its protocol is not known")
    return {"minReaderVersion": _READER_VERSIONS[-1], "minWriterVersion": _WRITER_VERSIONS[-1], **features}


def _features(protocol: Mapping[str, Any], kind: str) -> list[str]:
    """Those that a protocol lists, or, of the time before there were lists, implies by its versions."""
    listed = protocol.get(kind)
    if listed is not None:
        return list(listed)
    version = protocol["minReaderVersion" if kind == "readerFeatures" else "minWriterVersion"]
    implied = _IMPLIED_READER if kind == "readerFeatures" else _IMPLIED_WRITER
    return [feature for least, names in implied.items() if version >= least for feature in names]


def can_delete(state: DeltaState) -> bool:
    """Whether rows may be taken out of the table's files by deletion vectors."""
    features = state.protocol.get("writerFeatures") or ()
    return "deletionVectors" in features and state.metadata.properties.get("delta.enableDeletionVectors", "").lower() == "true"


def _metadata_names(found: Any) -> Iterator[str]:
    """The names of all metadata of columns, however deep they are; that a column takes no nulls counts as such."""
    if isinstance(found, Mapping):
        if isinstance(found.get("metadata"), Mapping):
            yield from found["metadata"]
        if found.get("nullable") is False:
            yield _NOT_NULL
        for name, value in found.items():
            if name != "metadata":
                yield from _metadata_names(value)
    elif isinstance(found, list):
        for each in found:
            yield from _metadata_names(each)
