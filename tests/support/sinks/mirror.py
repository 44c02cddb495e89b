"""One source mirrored through a real spool and a real sink."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.change import EXACT, EXACT_TYPE, LogStep
from penstock.position import Position
from penstock.postgres.chunks import snapshot_schema
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.delta.sink import DeltaSink
from penstock.sinks.row_files import write_batches
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.sinks.source import Row, Source, Value, exact_of, own_arrays, whole

PIPELINE = "shop"


class Mirror:
    """Copies the source at its fence when made; `follow` brings the target to the source's last commit, in
    one epoch.
    """

    def __init__(self, spark: SparkSession, root: Path, source: Source, sink: Sink | None = None) -> None:
        self.source = source
        delta = DeltaSink(spark, root / "lake", PIPELINE)
        self.sink = sink or delta
        self.path = delta.path(source.table.name)
        """Of the Delta table."""
        self.writer = SpoolWriter(root / "spool", Position.of(source.fence))
        self._reader = SpoolReader(root / "spool")
        self._written = 0
        self.snapshot()
        self.reached = source.fence

    def snapshot(self) -> None:
        place = self.sink.begin_snapshot(self.source.table, Position.of(self.source.fence))
        rows = self.source.states[self.source.fence]
        columns = [
            *own_arrays(self.source.table, rows),
            pa.array([exact_of(row) for row in rows], EXACT_TYPE),
        ]
        batch = pa.record_batch(columns, schema=snapshot_schema(self.source.table))
        files = [write_batches(iter([batch] if rows else []), place, 0)]
        self.sink.finish_snapshot(self.source.table, files, Position.of(self.source.fence))

    def spool(self) -> None:
        """Write the new commits of the source as one segment."""
        new = self.source.log[self._written :]
        self._written = len(self.source.log)
        self.append([whole(self.source.table, new)])

    def append(self, steps: Sequence[LogStep]) -> None:
        for step in steps:
            self.writer.append(step)
        self.writer.seal()

    def target(self) -> Target:
        target = self.sink.load_target(self.source.table.name)
        assert target is not None
        return target

    def changes(self, start: int, end: int) -> TableChanges | None:
        found = self._reader.read(Position.of(start), Position.of(end)).tables.get(self.source.table.name)
        return None if found is None else TableChanges(found.table, found.slices, found.counts)

    def apply(self, start: int, end: int) -> None:
        """Apply the epoch `(start, end]`. As in the pipeline, a table without changes is not touched."""
        changes = self.changes(start, end)
        if changes is not None:
            self.sink.apply(self.target(), changes, Position.of(end))
            assert self.target().applied == Position.of(end)
        self.reached = end

    def follow(self) -> None:
        self.spool()
        self.apply(self.reached, self.source.position)
        assert self.rows() == self.source.sorted_rows()

    def rows(self) -> list[Row]:
        """The target, as Spark reads it."""
        table = self.sink.read(self.source.table.name).toArrow()
        names = [column.name for column in self.source.table.columns]
        assert table.column_names == [*names, EXACT]
        columns = [column.to_pylist() for column in table.columns]
        rows = []
        for *values, exact in zip(*columns, strict=True):
            texts = dict(exact or [])
            assert exact is None or texts, "an empty map says nothing that a null does not"
            rows.append(
                {name: Value(value, texts.pop(name, None)) for name, value in zip(names, values, strict=True)}
            )
            assert not texts
        return sorted(rows, key=repr)

    def commits(self) -> list[list[dict[str, Any]]]:
        """The actions of each commit of the Delta log, oldest first."""
        files = sorted((self.path / "_delta_log").glob("*.json"))
        return [
            [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files
        ]

    def operation(self) -> str:
        """The operation that the last commit names."""
        return next(
            str(action["commitInfo"]["operation"]) for action in self.commits()[-1] if "commitInfo" in action
        )
