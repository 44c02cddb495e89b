"""Partitions that take rows along: attached with rows, detached or dropped. No log shows that, so the catalog has to.

The state directory holds which parts each table was seen to have. One that is no more took its rows along; one that is new and was a table
of its own before brought some. A state directory that is lost takes this knowledge along, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from penstock.errors import SpoolCorruptError
from penstock.postgres.attributes import Parts
from penstock.schema import TableName
from penstock.spool import storage

_FILE = "parts.json"
DETACHED = "a partition of it was detached or dropped, and its rows with it"
ATTACHED = "a partition was attached to it that had rows"


def moved_parts(known: Mapping[TableName, Collection[int]], now: Mapping[TableName, Parts]) -> dict[TableName, str]:
    """The tables that lost or got rows by their parts since these were known, and how."""
    moved: dict[TableName, str] = {}
    for name, parts in now.items():
        before = known.get(name)
        if before is not None and set(before) - parts.keys():
            moved[name] = DETACHED
        elif before is not None and any(is_attached for part, is_attached in parts.items() if part not in before):
            moved[name] = ATTACHED
    return moved


def load_parts(state: Path) -> dict[TableName, frozenset[int]]:
    """What was seen last; empty before the first look."""
    data = storage.read_bytes(state / _FILE)
    if data is None:
        return {}
    try:
        return {TableName.parse(name): frozenset(map(int, parts)) for name, parts in json.loads(data)["tables"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "remove the file if no partition has been attached, detached or dropped since the last run"
        raise SpoolCorruptError(f"{state / _FILE} cannot be understood", hint=hint) from error


def save_parts(state: Path, parts: Mapping[TableName, Collection[int]]) -> None:
    """Does nothing if it is what stands there."""
    if load_parts(state) != {name: frozenset(each) for name, each in parts.items()}:
        tables = {str(name): sorted(each) for name, each in sorted(parts.items())}
        storage.replace_bytes(state / _FILE, json.dumps({"format": 1, "tables": tables}).encode())
