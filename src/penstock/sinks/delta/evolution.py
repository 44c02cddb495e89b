"""A Delta table's columns as they become: what its log has to say about that, and which of its files have to be written anew.

Whatever changes about the columns goes into the same commit as the rows that need it, so nobody ever sees one without the other. Names are
only names, where the table maps its columns: the files carry others, which never change. A column that is added is null in the files that
are there; if it is something else, or a column holds more than before, the files are written anew, for whoever reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import pyarrow as pa

from penstock.sinks.delta.schema import FIELD_ID, PHYSICAL_NAME, type_document
from penstock.sinks.delta.state import DeltaState, Metadata, Unsupported
from penstock.sinks.evolution import Evolution
from penstock.sinks.layout import Mode, added_names

_MODE = "delta.columnMapping.mode"
_MAX_ID = "delta.columnMapping.maxColumnId"
_LOCAL_TIMES = "timestampNtz"


@dataclass(frozen=True)
class EvolvedState:
    """A state that is not committed yet: what it becomes of, and how."""

    state: DeltaState
    actions: tuple[dict[str, Any], ...]
    fills: Mapping[str, pa.Scalar]
    """What the rows that are there get in columns that are added, where it is not null."""
    is_rewritten: bool
    """Whether the files that are there have to be written anew."""


def evolve_state(state: DeltaState, evolution: Evolution, mode: Mode, properties: Mapping[str, str]) -> EvolvedState:
    """`properties` are those that change with it. Raises `Unsupported` where that takes more than the log."""
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
    """Of columns as the log counts them, those inside of others too."""

    def __init__(self, last: int) -> None:
        self.last = last

    def document(self) -> dict[str, object]:
        self.last += 1
        return {FIELD_ID: self.last, PHYSICAL_NAME: f"col-{uuid4()}"}


def _evolved(metadata: Metadata, evolution: Evolution, mode: Mode, properties: dict[str, str], numbers: _Numbers | None) -> Metadata:
    fields = []
    for found in metadata.fields:
        name = evolution.renamed.get(found["name"], found["name"])
        wider = evolution.widened.get(name)
        fields.append({**found, "name": name, **({} if wider is None else {"type": type_document(wider)})})
    own = [at for at, found in enumerate(metadata.fields) if found["name"] not in added_names(mode)]
    document = numbers.document if numbers is not None else dict
    new = [
        {"name": added.name, "type": type_document(added.arrow_type, document), "nullable": True, "metadata": document()}
        for added in evolution.added
    ]
    place = own[-1] + 1 if own else 0
    if numbers is not None:
        properties[_MAX_ID] = str(numbers.last)
    return Metadata(
        {
            **metadata.action,
            "schemaString": json.dumps({"type": "struct", "fields": [*fields[:place], *new, *fields[place:]]}),
            "configuration": {**metadata.properties, **properties},
        }
    )


def _with_feature(protocol: Mapping[str, Any], feature: str) -> dict[str, Any]:
    if protocol["minReaderVersion"] < 3 or protocol["minWriterVersion"] < 7:
        raise Unsupported("it lists no features, and needs one more")
    lists = ("readerFeatures", "writerFeatures")
    return {**protocol, **{name: [*(protocol.get(name) or ()), feature] for name in lists}}


def _holds_local_times(arrow_type: pa.DataType) -> bool:
    return any(pa.types.is_timestamp(each) and each.tz is None for each in _inner(arrow_type))


def _inner(arrow_type: pa.DataType) -> Iterator[pa.DataType]:
    yield arrow_type
    for at in range(arrow_type.num_fields):
        yield from _inner(arrow_type.field(at).type)
