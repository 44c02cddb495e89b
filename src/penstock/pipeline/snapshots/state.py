"""Durable state and progress of an unfinished snapshot, stored in the target, so that a later run reads only
the missing chunks.

```
<target root>/penstock_snapshots/<pipeline>/<schema>/<table>/
  plan.json            the table's `CopyFingerprint`, the first fence and the chunks; written once
  <plan id>/
    chunk-000017.json  a chunk that was read: its file, and its fence
    repair-…/          keys that changed between fences, and their rows as of the last fence
```

Each file is renamed into place after it is durable. Records are in the directory of their plan. So a task of
a former plan that could not be cancelled writes to a directory that is no longer used. The files are removed
when the target has committed the table. If they are lost before the commit, the table is read from the start.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock import storage
from penstock.position import Position
from penstock.postgres.chunks import Chunk, whole_leaves
from penstock.postgres.snapshot_export import CopyFingerprint, Leaf
from penstock.schema import TableName
from penstock.sinks.base import SNAPSHOTS, SnapshotFile, SnapshotPlace, directory_name
from penstock.spool.manifest import parse_schema, schema_document

_log = logging.getLogger(__name__)

FORMAT = 2
_PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """The plan of one attempt to copy a table. A chunk's number is its index in `chunks`."""

    id: str
    outline: CopyFingerprint
    fence: Position
    """The first fence. No row is read at an earlier position. The changes after it are needed until the
    snapshot is finished.
    """
    place: SnapshotPlace
    chunks: tuple[Chunk, ...]
    planned_at: datetime

    @property
    def heap_bytes(self) -> int:
        return sum(chunk.heap_bytes for chunk in self.chunks)

    def with_outline(self, outline: CopyFingerprint) -> SnapshotPlan:
        """Return the plan with `outline`, the table's current fingerprint. It must have the same heaps as the
        plan.

        SQL is built from the names, types and row filters in `outline`. Another user may have written the
        stored plan, so its own outline is only compared with the current one and never used in SQL.
        """
        heaps = whole_leaves(outline)
        chunks = (
            replace(heaps[chunk.heap_oid], first=chunk.first, last=chunk.last, heap_bytes=chunk.heap_bytes)
            for chunk in self.chunks
        )
        return replace(self, outline=outline, chunks=tuple(chunks))


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """The record of a chunk that was read, with the fence and the file of its rows."""

    number: int
    fence: Position
    file: SnapshotFile
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A stored plan, and the records of the chunks read so far, by chunk number."""

    plan: SnapshotPlan
    records: Mapping[int, ChunkRecord]

    @property
    def missing(self) -> list[int]:
        return [number for number in range(len(self.plan.chunks)) if number not in self.records]

    @property
    def fences(self) -> list[Position]:
        """The fences of the chunks read so far, in order."""
        return sorted({record.fence for record in self.records.values()})


class SnapshotStore:
    """The stored unfinished snapshots of one pipeline. Only the running pipeline writes them; any process may
    read them.
    """

    def __init__(self, root: Path, pipeline: str) -> None:
        self._target = root
        self._root = root / SNAPSHOTS / pipeline

    def begin(self, plan: SnapshotPlan) -> None:
        """Make the plan durable, and remove the previous one."""
        directory = self._directory(plan.outline.schema.name)
        records = self.records_directory(plan)
        for each in (self._root, records):
            storage.ensure_directory(each)
        for parent in records.parents:
            storage.sync_directory(parent)
            if parent == self._target:
                break
        storage.put(directory / _PLAN, json.dumps(_plan_document(plan)).encode())
        for entry in storage.list_directories(directory):
            if entry.name != plan.id:
                storage.delete_tree(directory / entry.name)

    def records_directory(self, plan: SnapshotPlan) -> Path:
        return self._directory(plan.outline.schema.name) / plan.id

    def load(self, table: TableName) -> SavedSnapshot | None:
        """Load the unfinished snapshot of a table. Returns None if the table has no such snapshot, or if its
        files are invalid; the table is then read from the start.
        """
        directory = self._directory(table)
        data = storage.read(directory / _PLAN)
        if data is None:
            return None
        try:
            plan = _parse_plan(json.loads(data))
            records = load_records(directory / plan.id)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            _log.warning(
                "unfinished snapshot has invalid content",
                extra={"table": str(table), "error": type(error).__name__},
            )
            return None
        return SavedSnapshot(
            plan, {number: record for number, record in records.items() if number < len(plan.chunks)}
        )

    def tables(self) -> list[TableName]:
        """Tables whose snapshot is not finished."""
        found = [
            _planned_table(storage.read(path)) for path in storage.list_paths(self._root, f"*/*/{_PLAN}")
        ]
        return sorted(table for table in found if table is not None)

    def forget(self, table: TableName) -> None:
        """Remove the snapshot's files. The plan is removed first, because without it the other files are
        ignored.
        """
        directory = self._directory(table)
        storage.delete(directory / _PLAN)
        storage.delete_tree(directory)

    def _directory(self, table: TableName) -> Path:
        return self._root / directory_name(table.schema) / directory_name(table.name)


def new_plan_id() -> str:
    return secrets.token_hex(8)


def record_chunk(directory: Path, record: ChunkRecord) -> None:
    """Record a chunk as read. Called by the task that read it, after the chunk's file is durable. Fails if
    the plan was removed.
    """
    document = {
        "format": FORMAT,
        "number": record.number,
        "fence": str(record.fence),
        "file": {
            "name": record.file.name,
            "rows": record.file.rows,
            "bytes": record.file.bytes,
            "stats": record.file.stats,
        },
        "finished_at": record.finished_at.isoformat(),
    }
    temporary = directory / f".{record.number:06d}-{secrets.token_hex(4)}"
    storage.write(temporary, json.dumps(document).encode())
    storage.rename(temporary, directory / f"chunk-{record.number:06d}.json")
    storage.sync_directory(directory)


def load_records(directory: Path) -> dict[int, ChunkRecord]:
    names = [name for name in storage.list_files(directory) if name.startswith("chunk-")]
    found = [
        _parse_record(json.loads(data))
        for name in names
        if (data := storage.read(directory / name)) is not None
    ]
    return {record.number: record for record in found}


def _planned_table(data: bytes | None) -> TableName | None:
    try:
        return None if data is None else parse_schema(json.loads(data)["schema"]).name
    except (ValueError, KeyError, TypeError):
        return None


def _parse_record(document: dict[str, Any]) -> ChunkRecord:
    file = document["file"]
    _check_file_name(file["name"])
    return ChunkRecord(
        document["number"],
        Position.parse(document["fence"]),
        SnapshotFile(file["name"], file["rows"], file["bytes"], file["stats"]),
        datetime.fromisoformat(document["finished_at"]),
    )


def _check_file_name(*names: str) -> None:
    if any("/" in name for name in names):
        raise ValueError("a path in place of a name")


def _plan_document(plan: SnapshotPlan) -> dict[str, object]:
    return {
        "format": FORMAT,
        "id": plan.id,
        "fence": str(plan.fence),
        "planned_at": plan.planned_at.isoformat(),
        **_outline_document(plan.outline),
        "place": {
            "directory": plan.place.directory,
            "prefix": plan.place.prefix,
            # the whole schema, because types alone do not have the metadata of nested columns
            "columns": base64.b64encode(plan.place.schema.serialize()).decode(),
            "values": plan.place.values,
        },
        "chunks": [[chunk.heap_oid, chunk.first, chunk.last, chunk.heap_bytes] for chunk in plan.chunks],
    }


def _outline_document(outline: CopyFingerprint) -> dict[str, object]:
    return {
        "schema": schema_document(outline.schema),
        "numbers": outline.numbers,
        "key_types": outline.key_types,
        "row_filter": outline.row_filter,
        "membership": outline.membership,
        "is_partitioned": outline.is_partitioned,
        "fingerprint": outline.fingerprint,
        "leaves": [[leaf.oid, leaf.name.schema, leaf.name.name, leaf.filenode] for leaf in outline.leaves],
        "members": [_outline_document(member) for member in outline.members],
        "source_column": outline.source_column,
    }


def _parse_plan(document: dict[str, Any]) -> SnapshotPlan:
    if document["format"] != FORMAT:
        raise ValueError("written by another version")
    outline = _parse_outline(document)
    place = document["place"]
    _check_file_name(document["id"], place["prefix"])
    columns = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(place["columns"])))
    return SnapshotPlan(
        document["id"],
        outline,
        Position.parse(document["fence"]),
        SnapshotPlace(
            place["directory"],
            columns,
            place["prefix"],
            tuple((name, value) for name, value in place.get("values", ())),
        ),
        _parse_chunks(document["chunks"], outline),
        datetime.fromisoformat(document["planned_at"]),
    )


def _parse_outline(document: dict[str, Any]) -> CopyFingerprint:
    leaves = [
        Leaf(oid, TableName(schema, name), filenode) for oid, schema, name, filenode in document["leaves"]
    ]
    return CopyFingerprint(
        parse_schema(document["schema"]),
        tuple(document["numbers"]),
        tuple(document["key_types"]),
        document["row_filter"],
        document["membership"],
        document["is_partitioned"],
        tuple(leaves),
        document["fingerprint"],
        tuple(_parse_outline(member) for member in document.get("members", ())),
        document.get("source_column", ""),
    )


def _parse_chunks(documents: Sequence[Any], outline: CopyFingerprint) -> tuple[Chunk, ...]:
    heaps = whole_leaves(outline)
    return tuple(
        replace(heaps[oid], first=first, last=last, heap_bytes=heap_bytes)
        for oid, first, last, heap_bytes in documents
    )


_RATE_WINDOW = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """Progress of one table's snapshot. `heap_bytes_*` are bytes of the source's heap, whose total is known
    in advance.
    """

    table: TableName
    fence: Position
    """The first fence: the spool keeps the changes after it."""
    chunks_done: int
    chunks_total: int
    rows: int
    heap_bytes_done: int
    heap_bytes_total: int
    target_bytes: int
    """Bytes of the files written so far."""
    rows_per_second: float | None
    heap_bytes_per_second: float | None
    """The rates are those of the minute before the last chunk was finished. None if they cannot be computed
    yet.
    """

    @property
    def seconds_left(self) -> float | None:
        if not self.heap_bytes_per_second:
            return None
        return (self.heap_bytes_total - self.heap_bytes_done) / self.heap_bytes_per_second

    def as_document(self) -> dict[str, object]:
        """Return the progress as a JSON document for programs. The names of its keys are stable."""
        left = self.seconds_left
        return {
            "fence": str(self.fence),
            "chunks_done": self.chunks_done,
            "chunks_total": self.chunks_total,
            "rows": self.rows,
            "heap_bytes_done": self.heap_bytes_done,
            "heap_bytes_total": self.heap_bytes_total,
            "target_bytes": self.target_bytes,
            "rows_per_second": None if self.rows_per_second is None else round(self.rows_per_second),
            "heap_bytes_per_second": None
            if self.heap_bytes_per_second is None
            else round(self.heap_bytes_per_second),
            "seconds_left": None if left is None else round(left, 1),
        }


def load_progress(root: Path, pipeline: str, table: TableName) -> SnapshotProgress | None:
    """Load the progress of one table's snapshot. Returns None if no snapshot of the table is in progress."""
    saved = SnapshotStore(root, pipeline).load(table)
    return None if saved is None else measure(saved)


def load_all_progress(root: Path, pipeline: str) -> dict[TableName, SnapshotProgress]:
    """Load the progress of every table whose snapshot is in progress."""
    found = {table: load_progress(root, pipeline, table) for table in SnapshotStore(root, pipeline).tables()}
    return {table: progress for table, progress in found.items() if progress is not None}


def measure(saved: SavedSnapshot) -> SnapshotProgress:
    plan, records = saved.plan, list(saved.records.values())
    rows_per_second, bytes_per_second = _rates(saved)
    return SnapshotProgress(
        plan.outline.schema.name,
        plan.fence,
        len(records),
        len(plan.chunks),
        sum(record.file.rows for record in records),
        sum(plan.chunks[record.number].heap_bytes for record in records),
        plan.heap_bytes,
        sum(record.file.bytes for record in records),
        rows_per_second,
        bytes_per_second,
    )


def _rates(saved: SavedSnapshot) -> tuple[float | None, float | None]:
    """Return rows and heap bytes per second, of the chunks that were finished within `_RATE_WINDOW` of the
    last one.
    """
    records = sorted(saved.records.values(), key=lambda record: record.finished_at)
    if not records:
        return None, None
    last = records[-1].finished_at
    recent = [record for record in records if record.finished_at >= last - _RATE_WINDOW]
    # the interval begins when the first recent chunk was finished, so that chunk is not counted
    since, counted = (
        (recent[0].finished_at, recent[1:]) if len(recent) > 1 else (saved.plan.planned_at, recent)
    )
    seconds = (last - since).total_seconds()
    if seconds <= 0:
        return None, None
    heap_bytes = sum(saved.plan.chunks[record.number].heap_bytes for record in counted)
    return sum(record.file.rows for record in counted) / seconds, heap_bytes / seconds
