"""The sinks of the matrix, opened as a configuration opens them: their table modes, and how to read their
tables.

Executors run in this thread. Tasks and results are pickled, as on their way to Spark's executors.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
import pyarrow.dataset as ds
import pytest
from _pytest.mark import ParameterSet
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from typing_extensions import override

from penstock.config.model import PipelineConfig
from penstock.config.sink import SinkConfig
from penstock.errors import SinkError
from penstock.pipeline.sink_factory import open_sink
from penstock.position import Position
from penstock.postgres.target.rows import Wanted, find_rows
from penstock.postgres.target.state import target_connection
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import Sink, SnapshotPlace
from penstock.sinks.dataframes import quoted
from penstock.sinks.delta import sink as delta_sink
from penstock.sinks.delta.log import DeltaTargets
from penstock.sinks.delta.sink import DeltaSink
from penstock.sinks.executors import Executors, In, Out
from penstock.sinks.iceberg.catalog import IcebergCatalog
from penstock.sinks.iceberg.reader import TableReader
from penstock.sinks.modes import Layout, Mode
from penstock.sinks.parquet.targets import ParquetTargets
from penstock.sinks.postgres.rows import parse_rows, stored_names
from penstock.sinks.postgres.targets import Naming
from tests.support.delta_tables import rows_of
from tests.support.property.source_model import Record
from tests.support.sinks.iceberg_lake import new_catalog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINE = "shop"
Seam = tuple[object, str]
"""An object and the name of its method: a process can die between two calls of these."""
FILES: tuple[Seam, ...] = tuple(
    (os, name) for name in ("rename", "replace", "link", "unlink", "mkdir", "fsync")
)


class InlineExecutors(Executors):
    """Runs tasks in this thread; `interlude` runs right before them."""

    def __init__(self) -> None:
        self.interlude: Callable[[], None] = lambda: None

    @property
    @override
    def parallelism(self) -> int:
        return 2

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        self.interlude()
        sent, received = cloudpickle.loads(cloudpickle.dumps((function, list(tasks))))
        try:
            done = [sent(task) for task in received]
        except OSError as error:
            raise SinkError(f"a task failed: {error}") from error  # like Spark's executors
        return list(cloudpickle.loads(cloudpickle.dumps(done)))


class SinkSetup(ABC):
    """A target of one kind that several pipelines can open in turn and any reader can read."""

    texts = False
    """Whether the target gets values in the source's text form."""
    seams: tuple[Seam, ...] = ((InlineExecutors, "run"), *FILES)

    def __init__(self, root: Path, spark: SparkSession | None) -> None:
        self.root = root
        self.spark = spark

    @classmethod
    def modes(cls) -> tuple[Mode, ...]:
        """The table modes that the sink declares."""
        return SinkConfig.model_validate(cls(Path(), None).sink_options()).modes

    @abstractmethod
    def sink_options(self) -> dict[str, Any]:
        """The `sink:` section of the configuration."""

    @abstractmethod
    def rows(self, table: TableName, layout: Layout) -> list[Record]:
        """The rows that a reader of the target sees."""

    def look(self, sink: Sink, table: TableName, layout: Layout) -> Callable[[], list[Record]]:
        """Keep the target's current state, to be read later."""
        del sink
        rows = self.rows(table, layout)
        return lambda: rows

    @abstractmethod
    def executed_by(self, sink: Sink, executors: Executors) -> None:
        """Let `executors` do the work of Spark's."""

    def begin(self, sink: Sink, table: TableSchema, mode: Mode, fence: Position) -> SnapshotPlace:
        """`begin_snapshot`, or a faster equivalent."""
        del mode
        return sink.begin_snapshot(table, fence)

    def copied(self, table: TableSchema) -> None:
        """Hook for changes to the target after the snapshot."""
        del table

    def open(self, mode: Mode, pipeline: str = PIPELINE) -> Sink:
        """The sink of another process."""
        config = PipelineConfig.model_validate(
            {
                "pipeline": pipeline,
                "source": {"dsn": "host=x"},
                "tables": ["*.*"],
                "sink": self.sink_options(),
                "mode": mode,
            }
        )
        sink = open_sink(config, self.spark)  # type: ignore[arg-type]
        self.executed_by(sink, InlineExecutors())
        return sink


class DeltaSetup(SinkSetup):
    _begun: ClassVar[dict[tuple[TableSchema, Mode, Position], tuple[Path, SnapshotPlace]]] = {}
    """Creating a table takes Spark a second.

    So a created table is copied file by file; its files do not contain its path.
    """

    @override
    def begin(self, sink: Sink, table: TableSchema, mode: Mode, fence: Position) -> SnapshotPlace:
        path = DeltaTargets(self.root / "lake", PIPELINE).path(table.name)
        if (table, mode, fence) not in self._begun:
            place, kept = sink.begin_snapshot(table, fence), self.root / "begun" / f"{len(self._begun)}"
            shutil.copytree(path, kept)
            self._begun[table, mode, fence] = kept, place
            return place
        kept, place = self._begun[table, mode, fence]
        shutil.copytree(kept, path)
        return replace(place, directory=str(path))

    @override
    def sink_options(self) -> dict[str, Any]:
        return {"delta": {"path": self.root / "lake"}}

    @override
    def executed_by(self, sink: Any, executors: Executors) -> None:
        sink._executors = executors

    @override
    def rows(self, table: TableName, layout: Layout) -> list[Record]:
        return rows_of(DeltaTargets(self.root / "lake", PIPELINE).path(table))


class NoExecutors(Executors):
    """For sinks that delegate their work."""

    @property
    @override
    def parallelism(self) -> int:
        return 1

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        raise AssertionError("this was to be left to Delta")


class MergedDeltaPlace(DeltaSetup):
    """Its tables have a feature that our own commits do not support: epochs use Delta's MERGE."""

    seams = ((DeltaSink, "_merge"), (delta_sink, "merge_changes"), (DeltaSink, "_check_reached"))

    @classmethod
    @override
    def modes(cls) -> tuple[Mode, ...]:
        return (Mode.MIRROR,)

    @override
    def copied(self, table: TableSchema) -> None:
        assert self.spark is not None
        path = DeltaTargets(self.root / "lake", PIPELINE).path(table.name)
        # Delta's change feed trips over a backtick in a column's name.
        is_plain = not any("`" in name for name in table.column_names)
        has = (
            "SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')"
            if is_plain
            else "ADD CONSTRAINT anything CHECK (1 = 1)"
        )
        self.spark.sql(f"ALTER TABLE delta.{quoted(str(path))} {has}")

    @override
    def executed_by(self, sink: Any, executors: Executors) -> None:
        sink._executors = NoExecutors()


class IcebergPlace(SinkSetup):
    """Iceberg writes its files itself."""

    seams = ((InlineExecutors, "run"), (IcebergCatalog, "commit"), (TableReader, "fetch"))

    def __init__(self, root: Path, spark: SparkSession | None) -> None:
        super().__init__(root, spark)
        self._catalog = new_catalog()
        self._versions: dict[TableName, list[int]] = {}
        self._seen: dict[int, list[Record]] = {}

    @override
    def sink_options(self) -> dict[str, Any]:
        return {"iceberg": {"catalog": self._catalog, "warehouse": self.root / "warehouse"}}

    @override
    def executed_by(self, sink: Any, executors: Executors) -> None:
        sink._executors = sink._writer._executors = executors

    @override
    def rows(self, table: TableName, layout: Layout) -> list[Record]:
        rows: list[Record] = self.open(layout.mode).read(table).toArrow().to_pylist()
        return rows

    @override
    def look(self, sink: Sink, table: TableName, layout: Layout) -> Callable[[], list[Record]]:
        """All versions are read in one job, when the first is needed."""
        target = sink.load_target(table)
        assert target is not None
        assert target.applied is not None
        version = sink.version_at(table, target.applied)
        assert version is not None
        self._versions.setdefault(table, []).append(version)

        def seen() -> list[Record]:
            if version not in self._seen:
                frames = [
                    sink.read(table, each).withColumn("version", F.lit(each))
                    for each in self._versions[table]
                ]
                self._seen |= {each: [] for each in self._versions[table]}
                for row in reduce(DataFrame.unionByName, frames).toArrow().to_pylist():
                    self._seen[row.pop("version")].append(row)
            return self._seen[version]

        return seen


class ThirdIcebergPlace(IcebergPlace):
    """Tables of format 3."""

    @override
    def sink_options(self) -> dict[str, Any]:
        options = super().sink_options()
        return {"iceberg": {**options["iceberg"], "format_version": 3}}


class PostgresSetup(SinkSetup):
    texts = True
    seams = ((InlineExecutors, "run"), (psycopg.Connection, "wait"))  # every exchange with the server

    dsn = "host=x"

    @override
    def sink_options(self) -> dict[str, Any]:
        return {"postgres": {"dsn": self.dsn, "schema_prefix": "copy_", "state": self.root / "state"}}

    @override
    def executed_by(self, sink: Any, executors: Executors) -> None:
        sink._executors = executors

    @override
    def rows(self, table: TableName, layout: Layout) -> list[Record]:
        place = Naming(prefix="copy_").place(table)
        config = SinkConfig.model_validate(self.sink_options()).postgres
        assert config is not None
        with target_connection(config.address(), "reading") as connection:
            rows: list[Record] = parse_rows(
                find_rows(connection, place, Wanted(stored_names(layout), (), {}), None), layout
            ).to_pylist()
        return rows


class ParquetSetup(SinkSetup):
    @override
    def sink_options(self) -> dict[str, Any]:
        return {"parquet": {"path": self.root / "lake"}}

    @override
    def executed_by(self, sink: Any, executors: Executors) -> None:
        sink._executors = executors

    @override
    def rows(self, table: TableName, layout: Layout) -> list[Record]:
        path = ParquetTargets(self.root / "lake", PIPELINE).path(table)
        rows: list[Record] = ds.dataset(path).to_table().to_pylist()
        return rows


SINK_SETUPS: dict[str, type[SinkSetup]] = {
    "delta": DeltaSetup,
    "iceberg": IcebergPlace,
    "postgres": PostgresSetup,
    "parquet": ParquetSetup,
}
MERGED = "delta-merge"
MORE_SINK_SETUPS: dict[str, type[SinkSetup]] = {"iceberg3": ThirdIcebergPlace, MERGED: MergedDeltaPlace}
"""Variants of the sinks, some of them slow, for tests that name them."""

NewSinkSetup = Callable[[str], SinkSetup]
"""An empty setup of that kind."""

SPARK = {name: [pytest.mark.spark] for name in ("delta", "iceberg", *MORE_SINK_SETUPS)}


Cell = tuple[str, Mode]
"""A sink, and one of the modes that it declares."""


def cells(*modes: Mode, of: Collection[str] = tuple(SINK_SETUPS)) -> list[Cell]:
    """Sinks in those of these modes that they support."""
    declared = {name: (SINK_SETUPS | MORE_SINK_SETUPS)[name].modes() for name in of}
    return [
        (name, mode)
        for name in of
        for mode in declared[name]
        if mode in modes or not {*modes} & {*declared[name]}
    ]


def parameters(wanted: Sequence[Cell]) -> list[ParameterSet]:
    return [pytest.param(cell, id="-".join(cell), marks=SPARK.get(cell[0], [])) for cell in wanted]
