"""Single commits of a Delta table's log, and what they say of how far the table is.

The log keeps the last position that was written under a name, whatever becomes of the rows: RESTORE brings back those of an older version
and leaves the position as it is. So the position that a table holds is that of its last commit of ours, unless it was restored since; then
it is the one that it held at the version to which it was. Where the log begins, a checkpoint says what commits before it did.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import TargetRewoundError
from penstock.position import Position
from penstock.sinks.delta.state import Unsupported, is_restore, load_checkpointed
from penstock.sinks.delta.vectors import DeletionVector
from penstock.spool import storage


def committed_position(path: Path, application: str, version: int) -> Position | None:
    """The position in one commit; None if it holds none of ours, or is no longer there by itself."""
    return _position(_actions(path, version, "txn") or [], application)


def has_moved(path: Path, application: str, version: int) -> bool:
    """Whether there is a commit of ours after `version`."""
    while (actions := _actions(path, version := version + 1, "txn")) is not None:
        if _position(actions, application) is not None:
            return True
    return False


def held_position(path: Path, application: str, version: int) -> Position | None:
    """The position that the table holds at `version`, as the commits up to there tell.

    None if they do not, for their log is cut off; then it was not restored since, and the last one that was written is the one it holds.
    """
    was_restored = False
    while version >= 0:
        actions = _actions(path, version, "txn", "commitInfo")
        if actions is None:
            return _checkpointed_position(path, application, version + 1) if was_restored else None
        position = _position(actions, application)
        if position is not None:
            return position
        is_back = is_restore(actions)
        was_restored = was_restored or is_back
        version = _restored_version(path, version) if is_back else version - 1
    return Position.ZERO


def _checkpointed_position(path: Path, application: str, version: int) -> Position:
    """The position that the table held where its log begins."""
    try:
        return Position.of(load_checkpointed(path, version).transactions.get(application, Position.ZERO.value))
    except (Unsupported, OSError, pa.ArrowException) as error:
        raise _rewound(path) from error


def _restored_version(path: Path, version: int) -> int:
    """The newest version before `version` with the same files. By its time or by its number, it need not be said which one was meant."""
    changed: Counter[tuple[str, str | None]] = Counter()
    for number in range(version, -1, -1):
        actions = _actions(path, number, "add", "remove")
        if actions is None:
            break
        for action in actions:
            came, file = ("add" in action, action.get("add") or action["remove"])
            vector = file.get("deletionVector")
            changed[file["path"], DeletionVector.parse(vector).identity if vector else None] += 1 if came else -1
        if not any(changed.values()):
            return number - 1
    raise _rewound(path)


def _rewound(path: Path) -> TargetRewoundError:
    return TargetRewoundError(
        f"{path} was restored, and its log does not reach back to what it was restored to",
        hint=f"penstock tables resync, or remove {path} and run again to copy the table anew",
    )


def _position(actions: list[Mapping[str, Any]], application: str) -> Position | None:
    found = (action["txn"] for action in actions if "txn" in action)
    return next((Position.of(each["version"]) for each in found if each["appId"] == application), None)


def _actions(path: Path, version: int, *kinds: str) -> list[Mapping[str, Any]] | None:
    """What a commit says of some kinds; None if it is not there."""
    data = storage.read_bytes(path / "_delta_log" / f"{version:020d}.json")
    begins = tuple(f'{{"{kind}"'.encode() for kind in kinds)
    return None if data is None else [json.loads(line) for line in data.splitlines() if line.startswith(begins)]
