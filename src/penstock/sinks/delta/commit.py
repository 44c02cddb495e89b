"""Commits to the log of a Delta table: create the next file of the log atomically.

The caller of `commit` names the version to create. If another writer has created that version, `commit`
writes nothing. The caller must then load the table and plan again, because the plan was made for an older
version.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock import storage
from penstock.errors import SinkError
from penstock.position import Position
from penstock.sinks.base import SnapshotFile
from penstock.sinks.delta.deletion_vectors import DeletionVector
from penstock.sinks.delta.state import DataFile, Unsupported, commit_file

ATTEMPTS = 5
"""Maximum number of times that a commit is planned, if other writers commit first."""
EPOCH = "PENSTOCK EPOCH"
"""The operation name of an epoch in the table's history."""


def commit(path: Path, version: int, actions: Sequence[Mapping[str, Any]]) -> bool:
    """Create `version` of the table from `actions`, durably. Returns False if that version already exists.

    The files that the actions name must be durable before the call. Their directory entries need not be,
    because this function syncs the directory of the table.
    """
    lines = (json.dumps(action, separators=(",", ":")) for action in actions)
    try:
        storage.sync_directory(path)
        return storage.create(commit_file(path, version), "\n".join(lines).encode() + b"\n", shared=True)
    except storage.LinksUnsupportedError as error:
        raise Unsupported("its file system has no hard links") from error
    except OSError as error:
        raise SinkError(f"cannot commit to {path}: {error.strerror}") from error


def commit_info(operation: str, parameters: Mapping[str, str], *, adds_only: bool) -> dict[str, Any]:
    """The action with a commit's entry in the table's history. `adds_only` must be false for a commit that
    removes rows or depends on existing rows.
    """
    return {
        "commitInfo": {
            "timestamp": now_ms(),
            "operation": operation,
            "operationParameters": {name: json.dumps(value) for name, value in parameters.items()},
            "isBlindAppend": adds_only,
            "engineInfo": "penstock",
            "txnId": str(uuid4()),
        }
    }


def transaction(application: str, position: Position) -> dict[str, Any]:
    return {"txn": {"appId": application, "version": position.value, "lastUpdated": now_ms()}}


def added(files: Iterable[SnapshotFile]) -> list[dict[str, Any]]:
    """Actions that add files in the table's directory."""
    now = now_ms()
    return [
        {
            "add": {
                "path": file.name,
                "partitionValues": {},
                "size": file.bytes,
                "modificationTime": now,
                "dataChange": True,
                "stats": file.stats,
            }
        }
        for file in files
        if file.rows
    ]


def removed(file: DataFile) -> dict[str, Any]:
    """The action that removes a file together with its deletion vector."""
    action: dict[str, Any] = {
        "path": file.path,
        "deletionTimestamp": now_ms(),
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": file.action.get("partitionValues") or {},
        "size": file.bytes,
    }
    if file.vector is not None:
        action["deletionVector"] = file.vector.document()
    return {"remove": action}


def marked(file: DataFile, vector: DeletionVector, rows: int) -> list[dict[str, Any]]:
    """The actions that give a file of `rows` rows another deletion vector."""
    again = {
        **file.action,
        "dataChange": True,
        "stats": wide_stats(file.stats, rows),
        "deletionVector": vector.document(),
    }
    return [removed(file), {"add": again}]


def wide_stats(stats: str | None, rows: int) -> str:
    """The same statistics, with bounds marked as not tight. The text of the bounds stays exactly the same; if
    that is not possible, the bounds are left out.
    """
    found = json.loads(stats) if stats else {}
    if found.get("numRecords") == rows and stats is not None:
        bounds = stats.strip()
        if "tightBounds" not in found:
            return '{"tightBounds":false,' + bounds[1:]
        if found["tightBounds"] is False:
            return bounds
        if bounds.endswith('"tightBounds":true}'):
            return bounds[: -len("true}")] + "false}"
    return json.dumps({"numRecords": rows, "tightBounds": False})


def now_ms() -> int:
    return int(time.time() * 1000)
