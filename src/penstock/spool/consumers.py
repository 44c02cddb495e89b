"""How far each reader of the spool has released it. What all of them have released may be deleted.

A consumer is one pipeline, and only it writes its own file. It appears by its first release, at the position from which it needs changes,
before it reads anything, and before the fence of a snapshot whose changes it will need; a spool without consumers keeps everything. The
capture may run all the while: every step here is one rename, so that it never sees a consumer gone for a moment.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SpoolCorruptError
from penstock.position import Position
from penstock.spool import storage
from penstock.spool.layout import FORMAT, SpoolLayout, consumer_name
from penstock.spool.manifest import parse_document


@dataclass(frozen=True, slots=True)
class Consumer:
    """One reader, as others see it."""

    name: str
    released: Position
    """It needs nothing up to here any more."""
    age_seconds: float
    """How long ago it said so. One that runs says so every few seconds."""


def release(root: Path, consumer: str, position: Position) -> Position:
    """Say that `consumer` needs nothing up to `position` any more; gives what is released now, since that never goes back."""
    path = SpoolLayout(root).consumer(consumer)
    current = _load(path)
    if current is not None and current >= position:
        storage.touch(path)  # it runs, although nothing comes or one of its tables waits
        return current
    return hold(root, consumer, position)


def hold(root: Path, consumer: str, position: Position) -> Position:
    """Say that `consumer` needs everything after `position`, also where it has released more: its target may have been put back."""
    document = {"format": FORMAT, "consumer": consumer, "released": str(position)}
    storage.make_directory(root)
    storage.replace_bytes(SpoolLayout(root).consumer(consumer), json.dumps(document).encode())
    return position


def forget(root: Path, consumer: str) -> bool:
    """Remove a consumer that will not read again; says whether it was known."""
    path = SpoolLayout(root).consumer(consumer)
    is_known = storage.mark(path) is not None
    storage.remove_file(path)
    return is_known


def inspect_consumers(root: Path) -> list[Consumer]:
    """Every consumer, by name."""
    layout = SpoolLayout(root)
    found = []
    for name, position in sorted(released(root).items()):
        mark = storage.mark(layout.consumer(name))
        if mark is not None:
            found.append(Consumer(name, position, max(0.0, time.time() - mark.modified_ns / 1e9)))
    return found


def released(root: Path) -> dict[str, Position]:
    """Every consumer with the position up to which it needs nothing any more."""
    layout = SpoolLayout(root)
    found: dict[str, Position] = {}
    for file_name in storage.list_files(layout.consumers):
        name = consumer_name(file_name)
        position = None if name is None else _load(layout.consumers / file_name)
        if name is not None and position is not None:
            found[name] = position
    return found


def minimum(root: Path) -> Position | None:
    """What no consumer needs any more; None if there is no consumer."""
    return min(released(root).values(), default=None)


def _load(path: Path) -> Position | None:
    data = storage.read_bytes(path)
    if data is None:
        return None
    document = parse_document(data, where=f"consumers/{path.name}")
    try:
        return Position.parse(document["released"])
    except (KeyError, TypeError, ValueError) as error:
        raise SpoolCorruptError(
            f"consumers/{path.name} holds no position",
            hint="restart that consumer: it writes the file anew. Without the file the capture lets go of what it needs",
        ) from error
