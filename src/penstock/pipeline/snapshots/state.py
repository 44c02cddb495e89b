"""What is known of a snapshot that is not finished: kept in the target, so that whoever comes next reads only what is missing.

```
<target root>/penstock_snapshots/<pipeline>/<schema>/<table>/
  plan.json            what the table looked like, where it stands in the log, how it is cut; written once
  <plan id>/
    chunk-000017.json  a chunk that has been read: its file, and the fence that it was read under
    repair-…/          keys that changed between fences, and their rows as they are at the last one
```

Each file is renamed into place after it has reached the disk. Records lie under the id of their plan, so that a task of a former plan, if
nobody could stop it, writes where nobody looks. All of it is removed when the target has the table; losing it means that the table is read
anew, no more.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.position import Position
from penstock.postgres.chunks import Chunk, whole_leaves
from penstock.postgres.outline import Leaf, TableOutline
from penstock.schema import TableName
from penstock.sinks.base import SnapshotFile, SnapshotPlace
from penstock.sinks.directories import SNAPSHOTS, directory_name
from penstock.spool import storage
from penstock.spool.manifest import parse_schema, schema_document

_log = logging.getLogger(__name__)

FORMAT = 2
_PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """One attempt at a table, from its first fence on. Chunks are known by their number, their place in `chunks`."""

    id: str
    outline: TableOutline
    fence: Position
    """The first: no chunk was read before it, and changes after it are needed for as long as the snapshot is not finished."""
    place: SnapshotPlace
    chunks: tuple[Chunk, ...]
    planned_at: datetime

    @property
    def heap_bytes(self) -> int:
        return sum(chunk.heap_bytes for chunk in self.chunks)

    def with_outline(self, outline: TableOutline) -> SnapshotPlan:
        """The same plan for a table as the catalog has it now, which has the same heaps.

        Statements are made from names, types and row filters of the outline. Those of a stored plan come from the target, where others
        may be able to write, so that they only serve to find out whether the table is still the same.
        """
        heaps = whole_leaves(outline)
        chunks = (replace(heaps[chunk.heap_oid], first=chunk.first, last=chunk.last, heap_bytes=chunk.heap_bytes) for chunk in self.chunks)
        return replace(self, outline=outline, chunks=tuple(chunks))


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk that has been read, and under which fence."""

    number: int
    fence: Position
    file: SnapshotFile
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A plan and what has been read of it, by number."""

    plan: SnapshotPlan
    records: Mapping[int, ChunkRecord]

    @property
    def missing(self) -> list[int]:
        return [number for number in range(len(self.plan.chunks)) if number not in self.records]

    @property
    def fences(self) -> list[Position]:
        """Those under which chunks have been read, in order."""
        return sorted({record.fence for record in self.records.values()})


class SnapshotStore:
    """The unfinished snapshots of one pipeline. Written by the pipeline that runs; read by anybody."""

    def __init__(self, root: Path, pipeline: str) -> None:
        self._target = root
        self._root = root / SNAPSHOTS / pipeline

    def begin(self, plan: SnapshotPlan) -> None:
        """Make the plan durable, and what was there before it vanish."""
        directory = self._directory(plan.outline.schema.name)
        records = self.records_directory(plan)
        for each in (self._root, records):
            storage.make_directory(each)
        for parent in records.parents:
            storage.sync_directory(parent)
            if parent == self._target:
                break
        storage.replace_bytes(directory / _PLAN, json.dumps(_plan_document(plan)).encode())
        for entry in storage.list_directories(directory):
            if entry.name != plan.id:
                storage.remove_tree(directory / entry.name)

    def records_directory(self, plan: SnapshotPlan) -> Path:
        return self._directory(plan.outline.schema.name) / plan.id

    def load(self, table: TableName) -> SavedSnapshot | None:
        """None if there is none, or none that can be understood: the table is then read anew."""
        directory = self._directory(table)
        data = storage.read_bytes(directory / _PLAN)
        if data is None:
            return None
        try:
            plan = _parse_plan(json.loads(data))
            records = load_records(directory / plan.id)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            _log.warning("unfinished snapshot not understood", extra={"table": str(table), "error": type(error).__name__})
            return None
        return SavedSnapshot(plan, {number: record for number, record in records.items() if number < len(plan.chunks)})

    def tables(self) -> list[TableName]:
        """Those whose snapshot is not finished."""
        found = [_planned_table(storage.read_bytes(path)) for path in self._root.glob(f"*/*/{_PLAN}")]
        return sorted(table for table in found if table is not None)

    def forget(self, table: TableName) -> None:
        """The plan goes first: what is left of the rest without it means nothing."""
        directory = self._directory(table)
        storage.remove_file(directory / _PLAN)
        storage.remove_tree(directory)

    def _directory(self, table: TableName) -> Path:
        return self._root / directory_name(table.schema) / directory_name(table.name)


def new_plan_id() -> str:
    return secrets.token_hex(8)


def record_chunk(directory: Path, record: ChunkRecord) -> None:
    """Called by the task that read the chunk, once its file and that file's name have reached the disk. Fails where the plan is gone."""
    document = {
        "format": FORMAT,
        "number": record.number,
        "fence": str(record.fence),
        "file": {"name": record.file.name, "rows": record.file.rows, "bytes": record.file.bytes, "stats": record.file.stats},
        "finished_at": record.finished_at.isoformat(),
    }
    temporary = directory / f".{record.number:06d}-{secrets.token_hex(4)}"
    storage.write_bytes(temporary, json.dumps(document).encode())
    storage.rename(temporary, directory / f"chunk-{record.number:06d}.json")
    storage.sync_directory(directory)


def load_records(directory: Path) -> dict[int, ChunkRecord]:
    names = [name for name in storage.list_files(directory) if name.startswith("chunk-")]
    found = [_parse_record(json.loads(data)) for name in names if (data := storage.read_bytes(directory / name)) is not None]
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
            # All of it: what a file says of its columns, those within columns too, is not in their types alone.
            "columns": base64.b64encode(plan.place.schema.serialize()).decode(),
            "values": plan.place.values,
        },
        "chunks": [[chunk.heap_oid, chunk.first, chunk.last, chunk.heap_bytes] for chunk in plan.chunks],
    }


def _outline_document(outline: TableOutline) -> dict[str, object]:
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
        SnapshotPlace(place["directory"], columns, place["prefix"], tuple((name, value) for name, value in place.get("values", ()))),
        _parse_chunks(document["chunks"], outline),
        datetime.fromisoformat(document["planned_at"]),
    )


def _parse_outline(document: dict[str, Any]) -> TableOutline:
    leaves = [Leaf(oid, TableName(schema, name), filenode) for oid, schema, name, filenode in document["leaves"]]
    return TableOutline(
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


def _parse_chunks(documents: Sequence[Any], outline: TableOutline) -> tuple[Chunk, ...]:
    heaps = whole_leaves(outline)
    return tuple(replace(heaps[oid], first=first, last=last, heap_bytes=heap_bytes) for oid, first, last, heap_bytes in documents)
