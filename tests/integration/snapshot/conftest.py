"""Fixtures of the snapshot tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.schema import TableName
from tests.support.fix_captured import Captured, capturing
from tests.support.fix_postgres import PostgresServer
from tests.support.snapshot.copying import PIPELINE, Copying
from tests.support.snapshot.local import FileSink, LocalExecutors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def captured(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    """A publication by root, as pipelines create it."""
    spool = tmp_path_factory.mktemp("captured") / "spool"
    with capturing(postgres_server, spool, "WITH (publish_via_partition_root = true)") as made:
        yield made


@pytest.fixture
def copying(captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copying:
    """Without Spark. One database and one capture for a whole module: give every test its own tables."""
    sink = FileSink(tmp_path / "lake")
    return Copying(captured, tmp_path / "lake", executors=LocalExecutors(), sink=sink, rows=sink.rows)


@pytest.fixture
def copying_on_spark(
    spark: SparkSession, captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Copying:
    """The same with Spark: into Delta tables, by executors."""
    from penstock.pipeline.snapshots.executors import SparkSnapshotExecutors
    from penstock.sinks.delta.sink import DeltaSink

    sink = DeltaSink(spark, tmp_path / "lake", PIPELINE)

    def rows(table: TableName) -> list[dict[str, Any]]:
        return list(spark.read.format("delta").load(str(sink.path(table))).toArrow().to_pylist())

    return Copying(captured, tmp_path / "lake", executors=SparkSnapshotExecutors(spark), sink=sink, rows=rows)
