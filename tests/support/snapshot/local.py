"""Sinks and executors without Spark: executors that run in this thread, and a sink of plain Parquet files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from typing_extensions import override

from penstock.change import EXACT, change_schema
from penstock.pipeline.snapshots.executors import SnapshotExecutors
from penstock.position import Position
from penstock.postgres.chunks import snapshot_schema
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import (
    ChangedRows,
    Sink,
    SnapshotFile,
    SnapshotPlace,
    TableChanges,
    Target,
    directory_name,
)
from penstock.sinks.executors import In, Out
from penstock.sinks.lineage import Origin
from penstock.spark.envelope import read_changes
from penstock.spool.manifest import parse_schema, schema_document
from penstock.spool.reader import FileSlice


class LocalExecutors(SnapshotExecutors):
    @property
    @override
    def parallelism(self) -> int:
        return 2

    @override
    def enter(self) -> None:
        pass

    @override
    def cancel(self) -> None:
        pass

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        return [function(task) for task in tasks]

    @override
    def write_keys(
        self, schema: TableSchema, slices: Sequence[FileSlice], directory: Path, constants: Sequence[str] = ()
    ) -> None:
        batches = [
            batch for slice in slices for batch in read_changes([slice], change_schema(slice.file.schema))
        ]
        changes = pa.Table.from_batches(batches)
        columns: dict[str, Any] = {}
        for at, name in enumerate(schema.key):
            columns[f"match_{at}"] = changes[name]
            columns[f"match_text_{at}"] = pc.map_lookup(changes[EXACT].combine_chunks(), name, "first")
        keys = pa.table(columns)
        keys = keys.group_by(keys.column_names).aggregate([])
        for at in range(len(schema.key)):
            written = keys[f"match_{at}"].cast(pa.string())
            keys = keys.append_column(f"text_{at}", pc.coalesce(keys[f"match_text_{at}"], written))
        for at, value in enumerate(constants, len(schema.key)):
            keys = keys.append_column(f"match_{at}", pa.array([value] * keys.num_rows, pa.string()))
            keys = keys.append_column(f"match_text_{at}", pa.nulls(keys.num_rows, pa.string()))
        directory.mkdir(exist_ok=True)
        pq.write_table(keys, directory / f"part-{len(list(directory.iterdir()))}.parquet")


class FileSink(Sink):
    """A directory for each table, with a document that lists the table's files and its applied position."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.begun = 0

    def path(self, table: TableName) -> Path:
        return self.root / directory_name(table.schema) / directory_name(table.name)

    @override
    def load_target(self, table: TableName) -> Target | None:
        document = self._load(table)
        if document is None:
            return None
        schema = parse_schema(document["schema"])
        applied = Position.parse(document["applied"]) if document["applied"] else None
        return Target(table, schema.oid, schema.key, pa.schema([]), applied)

    @override
    def describe(self, table: TableName) -> str:
        return str(self.path(table))

    @override
    def are_distinct(self, one: TableName, other: TableName) -> bool:
        return True

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        self.begun += 1
        shutil.rmtree(self.path(schema.name), ignore_errors=True)
        self.path(schema.name).mkdir(parents=True)
        self._save(schema, [], None)
        return SnapshotPlace(
            str(self.path(schema.name)), snapshot_schema(schema), f"snapshot-{fence.value:016X}"
        )

    @override
    def can_resume_snapshot(
        self, schema: TableSchema, place: SnapshotPlace, files: Sequence[SnapshotFile]
    ) -> bool:
        path, target = self.path(schema.name), self.load_target(schema.name)
        return (
            target is not None
            and target.applied is None
            and all((path / file.name).exists() for file in files if file.rows)
        )

    @override
    def finish_snapshot(self, schema: TableSchema, files: Sequence[SnapshotFile], fence: Position) -> None:
        self._save(schema, [file.name for file in files if file.rows], fence)

    @override
    def repair_snapshot(
        self, schema: TableSchema, files: Sequence[SnapshotFile], changed: ChangedRows, fence: Position
    ) -> None:
        path, columns = self.path(schema.name), snapshot_schema(schema)
        whole = [pq.read_table(path / file.name, schema=columns) for file in files if file.rows]
        keys = pq.read_table(changed.keys)
        count = len(schema.key)
        gone = {
            repr([row[f"{kind}_{at}"] for kind in ("match", "match_text") for at in range(count)])
            for row in keys.to_pylist()
        }  # fmt: skip
        rows = [
            row
            for row in pa.concat_tables([columns.empty_table(), *whole]).to_pylist()
            if repr(_identity(row, schema)) not in gone
        ]
        for name in changed.rows:
            rows += pq.read_table(name).rename_columns(columns.names).to_pylist()
        repaired = path / f"repaired-{fence.value:016X}.parquet"
        pq.write_table(pa.Table.from_pylist(rows, columns), repaired)
        self._save(schema, [repaired.name], fence)

    @override
    def drop(self, table: TableName) -> None:
        raise AssertionError("nothing is taken away here")

    @override
    def release_ownership(self, table: TableName) -> None:
        raise AssertionError("nothing is taken away here")

    @override
    def replace(self, table: TableName, shadow: Sink, position: Position) -> None:
        raise AssertionError("nothing is taken away here")

    @override
    def shadow(self, copy: str) -> Sink:
        raise AssertionError

    @override
    def drop_shadows(self) -> None:
        raise AssertionError

    @override
    def version_at(self, table: TableName, position: Position) -> int | None:
        raise AssertionError

    @override
    def read(self, table: TableName, version: int | None = None) -> DataFrame:
        raise AssertionError

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        raise AssertionError("nothing is streamed here")

    def rows(self, table: TableName) -> list[dict[str, Any]]:
        document = self._load(table)
        assert document is not None
        return [
            row for name in document["files"] for row in pq.read_table(self.path(table) / name).to_pylist()
        ]

    def _load(self, table: TableName) -> dict[str, Any] | None:
        path = self.path(table) / "table.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _save(self, schema: TableSchema, files: Sequence[str], applied: Position | None) -> None:
        document = {
            "schema": schema_document(schema),
            "files": list(files),
            "applied": str(applied) if applied else None,
        }
        temporary = self.path(schema.name) / "table.tmp"
        temporary.write_text(json.dumps(document))
        temporary.rename(self.path(schema.name) / "table.json")


def _identity(row: dict[str, Any], schema: TableSchema) -> list[Any]:
    exact = dict(row[EXACT] or ())
    return [*(row[name] for name in schema.key), *(exact.get(name) for name in schema.key)]


class OriginSink(FileSink):
    """Also keeps the lineage of a target."""

    origin: Origin | None = None

    @override
    def begin_snapshot(self, schema: TableSchema, fence: Position) -> SnapshotPlace:
        self.origin = Origin.of(schema)
        return super().begin_snapshot(schema, fence)

    @override
    def load_target(self, table: TableName) -> Target | None:
        target = super().load_target(table)
        return None if target is None else replace(target, origin=self.origin)
