"""How far each reader of the spool has released it. What all of them have released may be deleted.

A consumer is one pipeline, and only it writes its own file. It appears by its first release, at the position from which it needs changes,
before it reads anything; a spool without consumers keeps everything.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock.errors import SpoolCorruptError
from penstock.position import Position
from penstock.spool import storage
from penstock.spool.layout import FORMAT, SpoolLayout, consumer_name
from penstock.spool.manifest import parse_document


def release(root: Path, consumer: str, position: Position) -> Position:
    """Say that `consumer` needs nothing up to `position` any more; gives what is released now, since that never goes back."""
    path = SpoolLayout(root).consumer(consumer)
    current = _load(path)
    if current is not None and current >= position:
        return current
    document = {"format": FORMAT, "consumer": consumer, "released": str(position)}
    storage.replace_bytes(path, json.dumps(document).encode())
    return position


def forget(root: Path, consumer: str) -> None:
    """Remove a consumer that will not read again; nothing happens if it is not known."""
    storage.remove_file(SpoolLayout(root).consumer(consumer))


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
            f"consumers/{path.name} holds no position", hint="delete the file; the consumer writes it anew when it runs"
        ) from error
