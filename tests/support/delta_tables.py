"""Delta tables without a JVM: created by hand, changed by our own epochs, read by our own reader."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

from penstock.position import Position
from penstock.sinks.base import SnapshotPlace
from penstock.sinks.delta.commit import added, commit, commit_info, transaction
from penstock.sinks.delta.epoch import DeltaCommit
from penstock.sinks.delta.lookup import ScanFile, TableFiles, read_groups
from penstock.sinks.delta.state import DeltaState, file_schema, load_state, table_schema
from penstock.sinks.executors import Executors, In, Out
from penstock.sinks.modes import Layout
from penstock.sinks.row_files import write_batches
from penstock.spool.reader import FileSlice

APPLICATION = "penstock/test"
PROTOCOL = {
    "minReaderVersion": 3,
    "minWriterVersion": 7,
    "readerFeatures": ["deletionVectors", "columnMapping"],
    "writerFeatures": ["deletionVectors", "columnMapping", "appendOnly", "invariants"],
}
_NAMES = {
    pa.string(): "string",
    pa.int64(): "long",
    pa.int32(): "integer",
    pa.float64(): "double",
    pa.float32(): "float",
    pa.bool_(): "boolean",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
}


class InlineExecutors(Executors):
    """This thread."""

    def __init__(self, parallelism: int = 2) -> None:
        self._parallelism = parallelism
        self.tasks = 0

    @property
    @override
    def parallelism(self) -> int:
        return self._parallelism

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        self.tasks += len(tasks)
        return [function(task) for task in tasks]


def create_table(
    path: Path, layout: Layout, *, mapped: bool = False, properties: Mapping[str, str] | None = None
) -> None:
    """An empty table; with `mapped` the columns have other names in the files."""
    numbers = iter(range(1, 1000))

    def field(each: pa.Field) -> dict[str, Any]:
        number = next(numbers)
        metadata = (
            {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number:04d}"}
            if mapped
            else {}
        )
        return {"name": each.name, "type": kind(each.type), "nullable": True, "metadata": metadata}

    def kind(each: pa.DataType) -> object:
        if pa.types.is_decimal(each):
            return f"decimal({each.precision},{each.scale})"
        if pa.types.is_map(each):
            return {
                "type": "map",
                "keyType": kind(each.key_type),
                "valueType": kind(each.item_type),
                "valueContainsNull": True,
            }
        if pa.types.is_list(each):
            return {"type": "array", "elementType": kind(each.value_type), "containsNull": True}
        if pa.types.is_struct(each):
            return {"type": "struct", "fields": [field(child) for child in each]}
        return _NAMES[each]

    configuration = {
        "delta.enableDeletionVectors": "true",
        "delta.columnMapping.mode": "name" if mapped else "none",
        **(properties or {}),
    }
    metadata = {
        "id": "9c8f",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": [field(each) for each in layout.schema]}),
        "partitionColumns": [],
        "configuration": configuration,
    }
    (path / "_delta_log").mkdir(parents=True)
    assert commit(path, 0, [{"protocol": PROTOCOL}, {"metaData": metadata}])


def state_of(path: Path) -> DeltaState:
    state = load_state(path)
    assert state is not None
    return state


def files_of(path: Path, state: DeltaState | None = None) -> TableFiles:
    state = state or state_of(path)
    files = tuple(ScanFile(file.path, (), file.vector) for file in state.files.values())
    return TableFiles(str(path), table_schema(state.metadata), file_schema(state.metadata), (), files)


def add_rows(path: Path, rows: pa.Table, position: int = 100) -> None:
    """One more file."""
    state = state_of(path)
    names = file_schema(state.metadata)
    place = SnapshotPlace(str(path), names, "snapshot")
    file = write_batches(
        iter(rows.select(table_schema(state.metadata).names).to_batches()), place, state.version
    )
    info = commit_info("WRITE", {}, adds_only=True)
    assert commit(
        path, state.version + 1, [info, transaction(APPLICATION, Position.of(position)), *added([file])]
    )


def epoch(path: Path, layout: Layout, slices: Sequence[FileSlice], end: int) -> DeltaCommit:
    return DeltaCommit(path, APPLICATION, layout, state_of(path), Position.of(end), slices)


def read_all(table: TableFiles) -> pa.Table:
    return pa.concat_tables(
        [table.schema.empty_table(), *(rows for file in table.files for rows in read_groups(table, file))]
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_all(files_of(path)).to_pylist()
    return rows


def at_version(path: Path, version: int) -> DeltaState:
    """The table as it was."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "_delta_log"
        log.mkdir()
        for number in range(version + 1):
            shutil.copy(path / "_delta_log" / f"{number:020d}.json", log)
        return state_of(Path(scratch))
