"""Partitions that take rows along: attached with rows, detached, dropped or emptied. No log shows that, so the catalog has to.

The state directory holds which parts each table was seen to have, where the rows of each lay, and when. A part that is no more took its
rows along; one that is new and was a table of its own before brought some; one whose rows lie elsewhere was rewritten, or emptied. A
state directory that is lost takes this knowledge along, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import SpoolCorruptError
from penstock.pipeline.formats import check_format
from penstock.postgres.parts import Part, Parts
from penstock.schema import TableName
from penstock.spool import storage

_FILE = "parts.json"
_FORMAT = 2
DETACHED = "a partition of it was detached or dropped, and its rows with it"
ATTACHED = "a partition was attached to it that had rows"


@dataclass(frozen=True, slots=True)
class KnownParts:
    """The parts that a table was seen to have."""

    filenodes: Mapping[int, int]
    """By OID, where the rows lay; 0: nobody wrote that down."""
    mark: int
    """Every transaction before this one had ended by then."""

    @classmethod
    def of(cls, parts: Parts) -> KnownParts:
        return cls({oid: part.filenode for oid, part in parts.leaves.items()}, parts.mark)


def moved_parts(known: Mapping[TableName, KnownParts], now: Mapping[TableName, Parts]) -> dict[TableName, str]:
    """The tables that lost or got rows by parts that went or came since these were known, and how."""
    moved: dict[TableName, str] = {}
    for name, parts in now.items():
        before = known.get(name)
        if before is not None and before.filenodes.keys() - parts.leaves.keys():
            moved[name] = DETACHED
        elif before is not None and any(part.is_attached for oid, part in parts.leaves.items() if oid not in before.filenodes):
            moved[name] = ATTACHED
    return moved


def put_elsewhere(known: KnownParts, now: Parts) -> dict[int, Part]:
    """The parts whose rows do not lie where they did: rewritten, or emptied. What is made as a part lies under its own number at first."""
    return {oid: part for oid, part in now.leaves.items() if known.filenodes.get(oid, oid) not in (0, part.filenode)}


def load_parts(state: Path) -> dict[TableName, KnownParts]:
    """What was seen last; empty before the first look."""
    data = storage.read_bytes(state / _FILE)
    if data is None:
        return {}
    try:
        document = json.loads(data)
        check_format(document, _FORMAT, state / _FILE)
        return {TableName.parse(name): _parse(parts) for name, parts in document["tables"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "remove the file if no partition has been attached, detached, dropped or emptied since the last run"
        raise SpoolCorruptError(f"{state / _FILE} cannot be understood", hint=hint) from error


def _parse(parts: Any) -> KnownParts:
    if isinstance(parts, list):  # as format 1 has them
        return KnownParts({int(oid): 0 for oid in parts}, 0)
    return KnownParts({int(oid): int(filenode) for oid, filenode in parts["filenodes"].items()}, int(parts["mark"]))


def save_parts(state: Path, parts: Mapping[TableName, KnownParts]) -> None:
    """Does nothing if it is what stands there."""
    if load_parts(state) != parts:
        tables = {str(name): {"mark": each.mark, "filenodes": dict(sorted(each.filenodes.items()))} for name, each in sorted(parts.items())}
        storage.replace_bytes(state / _FILE, json.dumps({"format": _FORMAT, "tables": tables}).encode())
