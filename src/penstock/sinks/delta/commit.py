"""Commits to the log of a Delta table, written by ourselves: the next file of the log, put there whole or not at all.

`commit` names the version that it makes. If somebody else made it meanwhile, nothing is written, and whoever asked looks at the table
again: what was worked out for the version before may not hold any more.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from penstock.errors import SinkError
from penstock.position import Position
from penstock.sinks.base import SnapshotFile
from penstock.sinks.delta.state import DataFile, Unsupported, commit_file
from penstock.sinks.delta.vectors import DeletionVector
from penstock.spool import storage

EPOCH = "PENSTOCK EPOCH"
"""What the history of a table calls an epoch of ours."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def commit(path: Path, version: int, actions: Sequence[Mapping[str, Any]]) -> bool:
    """Make version `version` of the table at `path`, durably, of these actions. False: that version is there already.

    The files that the actions speak of must be durable before; the directory of the table is made so here.
    """
    target = commit_file(path, version)
    # A name with a dot is nobody's: neither Delta nor its VACUUM looks at it.
    written = target.with_name(f".penstock-{uuid4().hex}.tmp")
    lines = (json.dumps(action, separators=(",", ":")) for action in actions)
    try:
        storage.sync_directory(path)
        storage.write_bytes(written, "\n".join(lines).encode() + b"\n", shared=True)
        try:
            is_ours = link(written, target)
        finally:
            with suppress(OSError):  # a file that nobody looks at must not make a commit look as if it had failed
                written.unlink()
        if is_ours:
            storage.sync_directory(target.parent)
    except OSError as error:
        raise SinkError(f"nothing could be committed to {path}: {error.strerror}") from error
    return is_ours


def link(written: Path, target: Path) -> bool:
    """Whether `target` is now what was written; False if it was there before, whoever made it."""
    try:
        os.link(written, target)
    except FileExistsError:
        # Over NFS a link that was made may be asked for again, by a client that lost the answer.
        return target.samefile(written)
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise Unsupported("its disk has no links") from error
        raise
    return True


def commit_info(operation: str, parameters: Mapping[str, str], *, adds_only: bool) -> dict[str, Any]:
    """What the history of the table says about a commit. No writer that conflicts with it must take it for less than it is."""
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
    """Files that lie in the table's directory become part of it."""
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
    """The file goes, with the vector that it had."""
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
    """The file, of so many rows, stays, with another vector than it had."""
    again = {**file.action, "dataChange": True, "stats": wide_stats(file.stats, rows), "deletionVector": vector.document()}
    return [removed(file), {"add": again}]


def wide_stats(stats: str | None, rows: int) -> str:
    """The file's statistics, as bounds that its rows need not reach any more. Their text stays as it is, to the last digit."""
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
