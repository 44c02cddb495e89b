"""State of Parquet targets (change logs), read without Spark: location, owner and applied position.

```
<root>/<schema>/<table>/
  _penstock.json                              owner, and the source columns
  penstock_position=00000000000012345678/     the changes of the epoch that ends there; complete or absent
    *.parquet
  .…                                          a directory that is being written
```
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

from penstock import storage
from penstock.arrow import parse_type, type_text
from penstock.errors import SinkRefusedError, TargetForeignError
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import DirectoryTargets, Target
from penstock.sinks.modes import Mode

MODE = Mode.APPEND
"""The only mode of this sink."""

POSITION = "penstock_position"
"""The partition column that readers derive from directory names: the end position of the epoch that added the
row.
"""

_DOCUMENT = "_penstock.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class LogTable:
    """The description of a table in `_penstock.json`."""

    pipeline: str
    source_oid: int
    key: tuple[str, ...]
    columns: pa.Schema
    copy: str
    """The name of the hidden directory in which the snapshot is written until it is finished. It also
    identifies the copy (`Target.copy`).
    """
    counts: bool
    """Whether the positions in the directory names are valid. False if the content no longer corresponds to
    the source.
    """

    @classmethod
    def of(cls, pipeline: str, schema: TableSchema, copy: str) -> LogTable:
        columns = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
        return cls(pipeline, schema.oid, schema.key, columns, copy, counts=True)

    def is_of(self, schema: TableSchema) -> bool:
        return replace(LogTable.of(self.pipeline, schema, self.copy), counts=self.counts) == self


def save_table(path: Path, table: LogTable) -> None:
    document = {
        "format": _FORMAT,
        "pipeline": table.pipeline,
        "source_oid": table.source_oid,
        "key": table.key,
        "columns": [[field.name, type_text(field.type)] for field in table.columns],
        "copy": table.copy,
        "counts": table.counts,
    }
    storage.put(path / _DOCUMENT, json.dumps(document).encode(), shared=True)


def load_table(path: Path) -> LogTable | None:
    data = storage.read(path / _DOCUMENT)
    if data is None:
        return None
    try:
        document: dict[str, Any] = json.loads(data)
        if document["format"] > _FORMAT:
            raise SinkRefusedError(
                f"{path / _DOCUMENT} has format {document['format']}; this version of penstock reads up to "
                f"{_FORMAT}",
                hint="run the version of penstock that wrote it, or a newer one",
            )
        columns = pa.schema([pa.field(name, parse_type(text)) for name, text in document["columns"]])
        return LogTable(
            document["pipeline"],
            document["source_oid"],
            tuple(document["key"]),
            columns,
            document["copy"],
            counts=document["counts"],
        )
    except (ValueError, KeyError, TypeError) as error:
        hint = f"restore the file, or remove {path} and restart the pipeline to copy the table again"
        raise SinkRefusedError(f"{path / _DOCUMENT} is not valid", hint=hint) from error


def position_directory(path: Path, position: Position) -> Path:
    return path / f"{POSITION}={position.value:020d}"


def load_positions(path: Path) -> list[Position]:
    """The positions that have a directory, in ascending order."""
    names = [
        entry.name.removeprefix(f"{POSITION}=")
        for entry in storage.list_directories(path)
        if entry.name.startswith(f"{POSITION}=")
    ]
    return sorted(Position.of(int(name)) for name in names)


class ParquetTargets(DirectoryTargets):
    @override
    def load_target(self, table: TableName) -> Target | None:
        path = self.path(table)
        found = load_table(path)
        if found is None and not (storage.is_directory(path) and any(storage.list_paths(path))):
            return None
        if found is None or found.pipeline != self._pipeline:
            written_by = "something that is not Penstock" if found is None else f"pipeline {found.pipeline!r}"
            hint = "choose another path under sink.parquet, or remove that directory"
            raise TargetForeignError(f"{path} was written by {written_by}", hint=hint)
        positions = load_positions(path)
        applied = positions[-1] if positions and found.counts else None
        return Target(table, found.source_oid, found.key, found.columns, applied, MODE, copy=found.copy)
